"""A checkpoint as models and backends see it: a config, and tensors by their Hugging Face names.

Rule: nothing is read until it is asked for, and raw rows are views onto the file. What a kind of file
calls its tensors, and what it says of the model, is its own module's business.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, ModelLoadError, ProgramError, UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.quantization.formats import GROUP, STORED_TYPES, Format, common_format, holds_exactly
from octavo.weights.quantize_on_load import format_on_load


class TensorInfo(Protocol):
    """What is known of a tensor before it is read. shape: rows first."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...


class TensorFile(Protocol):
    """An open file of tensors."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """uint8 [rows, nbytes of a row], a view onto the file."""

    def release(self, name: str) -> None:
        """Let go of the tensor's pages that were read; they are read again if they are needed."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """One tensor of a file; see backends.base.WeightRows."""

    file: TensorFile
    name: str
    row_order: npt.NDArray[np.int32] | None

    @property
    def type_name(self) -> str:
        """The stored type of the rows."""
        return self.file.tensors[self.name].type_name

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """uint8 [rows, nbytes of a row], in the file's order."""
        return self.file.raw(self.name)

    def release(self) -> None:
        """Let go of the file's pages that were read."""
        self.file.release(self.name)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """f32 [*shape], rows in output order."""
        values = dequantize(self.raw, self.type_name).reshape(self.file.tensors[self.name].shape)
        return values if self.row_order is None else values[self.row_order]


@dataclass(frozen=True, slots=True)
class VectorInOrder:
    """A vector whose elements a file keeps in another order, as one row of f32: a WeightRows too."""

    stored: TensorRows

    type_name = "F32"
    row_order = None

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """uint8 [1, nbytes], in memory of its own."""
        return self.dequantize().view(np.uint8)[None]

    def release(self) -> None:
        """Let go of the file's pages that were read."""
        self.stored.release()

    def dequantize(self) -> npt.NDArray[np.float32]:
        """f32 [*shape], elements in output order."""
        return self.stored.dequantize()


class Checkpoint(abc.ABC):
    """A model on disk; `open_checkpoint` opens either kind.

    path: the file or directory. architecture: the model family, as its config calls it. metadata: GGUF's
    own, for the tokenizer; {} for a directory. quantized_on_load: tensors that `format_of` chose a quantised
    format for, though they are stored plain.
    """

    path: Path
    architecture: str
    metadata: dict[str, Any]

    def __init__(self) -> None:
        self.quantized_on_load: set[str] = set()
        self._converted: Counter[tuple[str, Format]] = Counter()

    @property
    @abc.abstractmethod
    def config(self) -> dict[str, Any]:
        """Hyperparameters under Hugging Face's keys; CheckpointError where one is missing or can't be."""

    @property
    def notes(self) -> list[str]:
        """What was changed on the way in, a line each: the weights that `format_of` found no format for
        that holds them exactly."""
        if not self._converted:
            return []
        counts = sorted(self._converted.items(), key=lambda item: item[0])
        listed = ", ".join(f"{count} of {stored} as {format_}" for (stored, format_), count in counts)
        return [f"{self.path.name}: tensors held in a format near their own, rounded to nearest: {listed}"]

    def format_of(
        self, parts: tuple[str, ...], plain: Format | None = None, quantization: str = "none"
    ) -> Format:
        """The format that all of these tensors, stacked, are held in; plain: instead of another plain one.
        quantization: what plain ones are quantised to, see `quantize_on_load`."""
        infos = [self._place(part)[1] for part in parts]
        for info in infos:
            if info.type_name not in STORED_TYPES:
                raise UnsupportedModelError(
                    f"{self.path.name}: tensor {info.name!r} is {info.type_name}, which no weight is "
                    f"computed with; served are {', '.join(STORED_TYPES)}. Convert the model to one of these"
                )
        format_ = common_format(info.type_name for info in infos)
        if plain is not None and not format_.quantized:
            format_ = plain
        on_load = format_on_load(parts, quantization)
        if on_load is not None and all(_may_be_quantized(info) for info in infos):
            self.quantized_on_load.update(parts)
            format_ = on_load
        for info in infos:
            if len(info.shape) > 1 and not holds_exactly(format_, info.type_name):
                self._converted[info.type_name, format_] += 1
        return format_

    def rows(self, name: str, shape: tuple[int, ...]) -> TensorRows | VectorInOrder:
        """A tensor whose rows are as wide as `shape` says."""
        file, info = self._place(name)
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
        rows = TensorRows(file, info.name, order)
        return rows if order is None or len(info.shape) > 1 else VectorInOrder(rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, rows first."""
        return self._place(name)[1].shape

    def check_all_used(self, names: Iterable[str]) -> None:
        """Raise UnsupportedModelError if there are tensors besides these: a model without its biases, or
        its rope factors, answers and answers wrongly."""
        left = sorted(self._unused(set(names)))
        if left:
            raise UnsupportedModelError(
                f"{self.path.name} has tensors that {self.architecture!r} models are not served with: "
                f"{', '.join(left[:8])}{f' and {len(left) - 8} more' if len(left) > 8 else ''}"
            )

    @abc.abstractmethod
    def has(self, name: str) -> bool:
        """Whether a tensor is there."""

    @abc.abstractmethod
    def close(self) -> None:
        """Unmap the files."""

    @abc.abstractmethod
    def _place(self, name: str) -> tuple[TensorFile, TensorInfo]:
        """Where the tensor that Hugging Face calls `name` lies; CheckpointError if nowhere."""

    @abc.abstractmethod
    def _row_order(self, name: str) -> npt.NDArray[np.int32] | None:
        """Output row i is the file's row [i]; None where the file keeps the order."""

    @abc.abstractmethod
    def _unused(self, names: set[str]) -> Collection[str]:
        """Tensors besides these, as the files call them, that change what a model answers."""


def _may_be_quantized(info: TensorInfo) -> bool:
    return not STORED_TYPES[info.type_name].format.quantized and info.shape[-1] % GROUP == 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors about a model that don't say which begin with its path."""
    try:
        yield
    except (ModelLoadError, ProgramError) as error:
        if str(error).startswith((str(path), path.name)):
            raise
        raise type(error)(f"{path}: {error}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or a directory in Hugging Face's layout."""
    if path.is_dir():
        from octavo.weights.safetensors_checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    from octavo.weights.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
