"""Which file builds which architecture, by Hugging Face's `model_type`; `gguf_config` has these for GGUF."""

from __future__ import annotations

from collections.abc import Callable

from octavo.errors import UnsupportedModelError
from octavo.models import gemma, gpt_oss, llama, olmo2
from octavo.models.blocks import Config
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Program

Build = Callable[[ProgramBuilder, Config, int], Program]

MODELS: dict[str, Build] = {
    name: family.build for family in (llama, gemma, olmo2, gpt_oss) for name in family.ARCHITECTURES
}


def model_builder(architecture: str) -> Build:
    """The builder of an architecture; UnsupportedModelError names what is served."""
    if architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture {architecture[:80]!r} is not served; served so far: {', '.join(sorted(MODELS))}"
        )
    return MODELS[architecture]
