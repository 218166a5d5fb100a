"""A checkpoint as models and backends see it: a config, and tensors by their Hugging Face names.

Rule: nothing is read until it is asked for, and raw rows are views onto the file.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.formats import GGUF_FORMATS, Format
from octavo.weights.gguf import GGUFFile, TensorInfo
from octavo.weights.names import (
    GGUF_ARCHITECTURES,
    INTERLEAVED_ARCHITECTURES,
    deinterleaved_rows,
    gguf_name,
)


@dataclass(frozen=True, slots=True)
class TensorRows:
    """One tensor of a GGUF file; see backends.base.WeightRows."""

    file: GGUFFile
    name: str
    row_order: npt.NDArray[np.int32] | None

    @property
    def type_name(self) -> str:
        """The GGUF type of the rows."""
        return self.file.tensors[self.name].type_name

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """uint8 [rows, nbytes of a row], in the file's order."""
        return self.file.raw(self.name)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """f32 [rows, K], rows in output order."""
        values = self.file.dequantize(self.name)
        return values if self.row_order is None else values[self.row_order]


class Checkpoint:
    """A GGUF file.

    architecture: the model family. config: its hyperparameters under Hugging Face's keys, read when first
    asked for, so that a family nobody serves is refused by its name. metadata: GGUF's own, for the
    tokenizer.
    """

    def __init__(self, path: Path) -> None:
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

    def format_of(self, parts: tuple[str, ...]) -> Format:
        """The format that holds all of these tensors."""
        formats = set()
        for part in parts:
            info = self._info(part)
            if info.type_name not in GGUF_FORMATS:
                raise UnsupportedModelError(
                    f"{self.path.name}: tensor {info.name!r} is {info.type_name}; served so far: "
                    f"{', '.join(GGUF_FORMATS)}. Use a Q4_1 or Q8_0 file of this model"
                )
            formats.add(GGUF_FORMATS[info.type_name])
        if len(formats) > 1:
            raise UnsupportedModelError(
                f"{self.path.name}: {', '.join(parts)} are stored as {', '.join(sorted(formats))}, but "
                "are computed as one matrix; use a file that quantises them alike"
            )
        return formats.pop()

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return gguf_name(name) in self._file.tensors

    def rows(self, name: str, shape: tuple[int, ...]) -> TensorRows:
        """A tensor whose rows are as wide as `shape` says."""
        info = self._info(name)
        if info.shape[1:] != shape[1:]:
            raise CheckpointError(
                f"{self.path.name}: tensor {info.name!r} has shape {info.shape}, but the model's "
                f"hyperparameters make it [*, {', '.join(map(str, shape[1:]))}]"
            )
        order = self._row_order(name)
        if order is not None and len(order) != info.shape[0]:
            raise CheckpointError(
                f"{self.path.name}: tensor {info.name!r} has {info.shape[0]} rows, but the model's "
                f"hyperparameters make it {len(order)}"
            )
        return TensorRows(self._file, info.name, order)

    def check_all_used(self, names: Iterable[str]) -> None:
        """Raise UnsupportedModelError if there are tensors besides these: a model without its biases, or
        its rope factors, answers and answers wrongly."""
        left = sorted(set(self._file.tensors) - {gguf_name(name) for name in names})
        if left:
            raise UnsupportedModelError(
                f"{self.path.name} has tensors that {self.architecture!r} models are not served with: "
                f"{', '.join(left[:8])}{f' and {len(left) - 8} more' if len(left) > 8 else ''}"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, rows first."""
        return self._info(name).shape

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(gguf_name(name))
        if info is None:
            raise CheckpointError(f"{self.path.name}: tensor {gguf_name(name)!r} is missing")
        return info

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
