"""Octavo: an LLM inference engine whose answers do not depend on load.

Importing this package imports no torch; that waits until an engine is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.llm import LLM
    from octavo.runner.model_runner import ModelRunner
    from octavo.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncEngine", "EngineConfig", "ModelRunner", "SamplingParams"]

_HOMES = {
    "LLM": "octavo.engine.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "EngineConfig": "octavo.config.schema",
    "ModelRunner": "octavo.runner.model_runner",
    "SamplingParams": "octavo.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
