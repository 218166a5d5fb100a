"""A checkpoint in one GGUF file.

Rule: its metadata are believed only as far as they make sense, and say which key does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.checkpoint import Checkpoint, TensorFile, TensorInfo
from octavo.weights.gguf import GGUFFile
from octavo.weights.names import (
    GGUF_ARCHITECTURES,
    INTERLEAVED_ARCHITECTURES,
    deinterleaved_rows,
    gguf_name,
)


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. Its config is read when first asked for, so that a family nobody serves is refused by
    its name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._file = GGUFFile.open(path)
        self.metadata: dict[str, Any] = self._file.metadata
        self.architecture = str(self._required("general.architecture"))

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Hyperparameters; CheckpointError where one is missing or can't be."""
        if self.architecture not in GGUF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path.name}: GGUF files of {self.architecture!r} are not read yet, only those of "
                f"{', '.join(sorted(GGUF_ARCHITECTURES))}"
            )
        heads = self._count("attention.head_count")
        hidden = self._count("embedding_length")
        head_dim = self._count("attention.key_length", max(hidden // heads, 1))
        return {
            "model_type": self.architecture,
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rotary_dim": self._count("rope.dimension_count", head_dim),
            "rms_norm_eps": self._positive("attention.layer_norm_rms_epsilon"),
            "rope_parameters": {
                "rope_type": self._rope_type(),
                "rope_theta": self._positive("rope.freq_base", 10000.0),
            },
            "max_position_embeddings": self._count("context_length"),
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "tie_word_embeddings": not self.has("lm_head.weight"),
        }

    def _rope_type(self) -> str:
        """GGUF's other types come with keys and tensors that are not read yet: passed on, to be refused."""
        name = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        return "default" if name == "none" else f"{name} (GGUF)"

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return gguf_name(name) in self._file.tensors

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _place(self, name: str) -> tuple[TensorFile, TensorInfo]:
        info = self._file.tensors.get(gguf_name(name))
        if info is None:
            raise CheckpointError(f"{self.path.name}: tensor {gguf_name(name)!r} is missing")
        return self._file, info

    def _unused(self, names: set[str]) -> Collection[str]:
        return set(self._file.tensors) - {gguf_name(name) for name in names}

    def _row_order(self, name: str) -> npt.NDArray[np.int32] | None:
        if self.architecture not in INTERLEAVED_ARCHITECTURES:
            return None
        heads = {
            "q_proj.weight": self.config["num_attention_heads"],
            "k_proj.weight": self.config["num_key_value_heads"],
        }
        num_heads = next((n for suffix, n in heads.items() if name.endswith(suffix)), None)
        return None if num_heads is None else deinterleaved_rows(num_heads, self.config["head_dim"])

    def _required(self, key: str) -> Any:
        if key not in self.metadata:
            raise CheckpointError(f"{self.path.name}: metadata {key!r} is missing")
        return self.metadata[key]

    def _count(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture's metadata, at least 1."""
        value = self._number(key, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise CheckpointError(
                f"{self.path.name}: metadata {self.architecture}.{key} is {value!r}; only a number of at "
                "least 1 makes sense"
            )
        return value

    def _positive(self, key: str, default: float | None = None) -> float:
        value = self._number(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{self.path.name}: metadata {self.architecture}.{key} is {value!r}; only a number above 0 "
                "makes sense"
            )
        return float(value)

    def _number(self, key: str, default: float | None) -> Any:
        full = f"{self.architecture}.{key}"
        return self._required(full) if default is None else self.metadata.get(full, default)
