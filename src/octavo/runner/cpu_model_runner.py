"""A runner in the CPU's memory.

Rule: the backend is chosen once, here, and a fallback is said aloud.
"""

from __future__ import annotations

import logging

import torch

from octavo.backends.base import Backend, DeviceMemory
from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.config.schema import EngineConfig
from octavo.platforms import cpu
from octavo.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class CPUModelRunner(ModelRunner):
    """ModelRunner on the native backend, or on torch."""

    def _choose_backend(self, config: EngineConfig) -> Backend:
        threads = config.threads or cpu.num_threads()
        if config.backend == "auto" and not library.available():
            reason = f"the native CPU kernels can't be used: {library.why_unavailable()}"
            logger.warning("%s. The torch backend serves, slowly. %s", reason, library.HOW_TO_BUILD)
            self.declined[NativeBackend.name] = f"{reason}. {library.HOW_TO_BUILD}"
            return TorchBackend(num_threads=threads)
        if config.backend == "torch":
            return TorchBackend(num_threads=threads)
        return NativeBackend(num_threads=threads)

    def _allocate(self, num_blocks: int) -> DeviceMemory:
        return DeviceMemory(
            weights=torch.empty(self.sealed.weights_nbytes, dtype=torch.uint8),
            arena=torch.empty(self.sealed.arena_nbytes, dtype=torch.uint8),
            kv=torch.empty(
                (self.program.num_storages, num_blocks, self.program.page_nbytes), dtype=torch.uint8
            ),
        )
