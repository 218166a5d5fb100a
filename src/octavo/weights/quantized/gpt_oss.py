"""gpt-oss keeps the experts of a layer in one tensor; here each is a matrix of its own.

    gate_up_proj         [E, H, 2 F]            plain: of expert e, column 2 i is gate i, column 2 i + 1 up i
    down_proj            [E, F, H]
    .._blocks            [E, rows, K / 32, 16]  or MXFP4: row by row, two weights a byte, the first one low
    .._scales            [E, rows, K / 32]      exponents, biased by 127
    gate_up_proj_bias    [E, 2 F]
    down_proj_bias       [E, H]

Rule: nothing is computed. Plain weights are transposed; MXFP4's become GGUF's blocks of the same name, where
byte j holds weights j and j + 16.

Source: the layout of OpenAI's files, and of those that transformers writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.weights.quantized.packed import FLOATS, PackedTensors
from octavo.weights.quantized.scheme import Bytes, PackedWeight, Reading, Scheme

_ELEMENTS = {"F16": "<u2", "BF16": "<u2", "F32": "<u4"}
_GROUP = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one of an expert's matrices lies: rows start, start + step, .. of a stacked tensor."""

    name: str
    stack: str
    start: int
    step: int


_PARTS = (
    _Part("gate_proj", "gate_up_proj", 0, 2),
    _Part("up_proj", "gate_up_proj", 1, 2),
    _Part("down_proj", "down_proj", 0, 1),
)


class GptOssScheme(Scheme):
    """The experts of all layers."""

    label = "stacked experts"

    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """Three matrices and three biases for each expert."""
        for experts in tensors.ending(".down_proj_bias"):
            for part in _PARTS:
                yield from _of_part(tensors, experts, part)


def _of_part(tensors: PackedTensors, experts: str, part: _Part) -> Iterator[PackedWeight]:
    stack = f"{experts}.{part.stack}"
    bias = tensors.require(f"{stack}_bias", f"{experts}.down_proj_bias")
    tensors.expect(bias, FLOATS)
    shape = tensors.shape(bias)
    if len(shape) != 2 or not all(shape) or shape[1] % part.step:
        tensors.fail(bias, f"has shape {shape}; it must be [experts, outputs]")
    packed = f"{stack}_blocks" in tensors
    for e in range(shape[0]):
        name = f"{experts}.{e}.{part.name}"
        yield _Bias(tensors, f"{name}.bias", bias, part, e)
        yield (_Mxfp4 if packed else _Plain)(tensors, f"{name}.weight", stack, part, e, shape)


class _Bias(PackedWeight):
    def __init__(self, tensors: PackedTensors, name: str, stack: str, part: _Part, expert: int) -> None:
        super().__init__(name, (tensors.shape(stack)[1] // part.step,), {stack})
        self._tensors, self._stack, self._part, self._expert = tensors, stack, part, expert

    @functools.cached_property
    def reading(self) -> Reading:
        """See PackedWeight."""
        return Reading(self._tensors.dtype(self._stack), "biases as they are")

    def rows(self) -> Bytes:
        """See PackedWeight."""
        values = _elements(self._tensors, self._stack)[self._expert]
        return _as_rows(values[None, self._part.start :: self._part.step])


class _Plain(PackedWeight):
    """[E, K, rows] of a float type."""

    def __init__(
        self, tensors: PackedTensors, name: str, stack: str, part: _Part, expert: int, biases: tuple[int, ...]
    ) -> None:
        tensors.require(stack, f"{stack}_bias")
        tensors.expect(stack, FLOATS)
        shape = tensors.shape(stack)
        if len(shape) != 3 or not all(shape) or (shape[0], shape[2]) != biases:
            tensors.fail(stack, f"has shape {shape}; its bias makes it [{biases[0]}, *, {biases[1]}]")
        super().__init__(name, (shape[2] // part.step, shape[1]), {stack})
        self._tensors, self._stack, self._part, self._expert = tensors, stack, part, expert

    @functools.cached_property
    def reading(self) -> Reading:
        """See PackedWeight."""
        return Reading(self._tensors.dtype(self._stack), "a matrix each, as they are")

    def rows(self) -> Bytes:
        """See PackedWeight."""
        values = _elements(self._tensors, self._stack)[self._expert]
        return _as_rows(values[:, self._part.start :: self._part.step].T)


class _Mxfp4(PackedWeight):
    """[E, rows, K / 32, 16] of two weights a byte, and their exponents."""

    def __init__(
        self, tensors: PackedTensors, name: str, stack: str, part: _Part, expert: int, biases: tuple[int, ...]
    ) -> None:
        blocks, scales = f"{stack}_blocks", f"{stack}_scales"
        tensors.require(scales, blocks)
        tensors.expect(blocks, ("U8",))
        shape = tensors.shape(blocks)
        if len(shape) != 4 or not all(shape) or shape[:2] != biases or shape[3] != _GROUP // 2:
            tensors.fail(blocks, f"has shape {shape}; its bias makes it [{biases[0]}, {biases[1]}, *, 16]")
        tensors.expect(scales, ("U8",), shape[:3])
        super().__init__(name, (shape[1] // part.step, shape[2] * _GROUP), {blocks, scales})
        self._tensors, self._part, self._expert = tensors, part, expert
        self._blocks, self._scales = blocks, scales

    @functools.cached_property
    def reading(self) -> Reading:
        """See PackedWeight."""
        return Reading("MXFP4", "MXFP4, a matrix each")

    def rows(self) -> Bytes:
        """See PackedWeight."""
        chosen = slice(self._part.start, None, self._part.step)
        pairs, exponents = (
            self._tensors.raw(name).reshape(self._tensors.shape(name))[self._expert, chosen]
            for name in (self._blocks, self._scales)
        )
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:2], _GROUP)
        low, high = codes[:, :, : _GROUP // 2], codes[:, :, _GROUP // 2 :]
        blocks = np.concatenate([exponents[:, :, None], low | high << 4], axis=2)
        return np.ascontiguousarray(blocks.reshape(len(blocks), -1))


def _elements(tensors: PackedTensors, name: str) -> npt.NDArray[Any]:
    """A tensor's elements, as integers of their size."""
    return tensors.raw(name).view(_ELEMENTS[tensors.dtype(name)]).reshape(tensors.shape(name))


def _as_rows(values: npt.NDArray[Any]) -> Bytes:
    """uint8 [rows, nbytes of a row]."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
