"""A runner in the CPU's memory.

Rule: the backend is chosen once, here, and a fallback is said aloud.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap

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
            weights=huge_pages(self.sealed.weights_nbytes),
            arena=huge_pages(self.sealed.arena_nbytes),
            kv=huge_pages(self.program.num_storages, num_blocks, self.program.page_nbytes),
        )


def huge_pages(*shape: int) -> torch.Tensor:
    """Zeros, uint8, in huge pages where the system has them: a decode reads all weights and, through block
    tables, all of the cache, and spends a third of its time looking up where small pages are.
    MemoryError if this process can't have so much."""
    nbytes = math.prod(shape)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # of a kernel that was built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(shape)
