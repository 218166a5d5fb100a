"""A checkpoint in one GGUF file.

Rule: what the file says of the model is `gguf_config`'s business, what it calls tensors that of `names`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.checkpoint import Checkpoint, TensorFile, TensorInfo
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_config import ROPE_TENSORS, config_of, family_of
from octavo.weights.names import INTERLEAVED_FAMILIES, deinterleaved_rows, gguf_name, is_stack


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. Its config is read when first asked for, so that a family nobody serves is refused by
    its name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = GGUFFile.open(path)
        self.metadata: dict[str, Any] = self._file.metadata
        self.architecture = family_of(self._file)
        self._file.unstack([name for name in self._file.tensors if is_stack(name)])

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Hyperparameters; see `gguf_config.config_of`."""
        return config_of(self._file)

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return self._name(name) in self._file.tensors

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _name(self, name: str) -> str:
        return gguf_name(name, self.architecture)

    def _place(self, name: str) -> tuple[TensorFile, TensorInfo]:
        info = self._file.tensors.get(self._name(name))
        if info is None:
            raise CheckpointError(f"{self.path.name}: tensor {self._name(name)!r} is missing")
        return self._file, info

    def _unused(self, names: set[str]) -> Collection[str]:
        return set(self._file.tensors) - {self._name(name) for name in names} - ROPE_TENSORS

    def _row_order(self, name: str) -> npt.NDArray[np.int32] | None:
        if self.architecture not in INTERLEAVED_FAMILIES:
            return None
        heads = {
            "q_proj": self.config["num_attention_heads"],
            "k_proj": self.config["num_key_value_heads"],
        }
        num_heads = heads.get(name.split(".")[-2])
        return None if num_heads is None else deinterleaved_rows(num_heads, self.config["head_dim"])
