"""Which file builds which architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models import llama
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Program

Build = Callable[[ProgramBuilder, Mapping[str, Any], int], Program]

MODELS: dict[str, Build] = {"llama": llama.build}


def model_builder(architecture: str) -> Build:
    """The builder of an architecture; UnsupportedModelError names what is served."""
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not served; served so far: {', '.join(sorted(MODELS))}"
        )
    return MODELS[architecture]
