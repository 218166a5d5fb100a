"""Weights that are floats of 8 bits with scales: as BF16 rows.

    w = s q,   q of e4m3 (3 bits of mantissa) or e5m2 (2 bits)

Rule: products are rounded to the nearest bf16, which moves a weight by at most 2^-8 of itself, where q's own
neighbours are at least 2^-4 apart; where every scale is a power of two nothing is rounded.

Sources: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), with OCP's e4m3 without infinities; for
the layouts, DeepSeek-V3's and AutoFP8's files.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.quantization.conversion import round_to_bf16
from octavo.weights.quantized.grid import Grid, counts
from octavo.weights.quantized.packed import FLOATS, PackedTensors
from octavo.weights.quantized.scheme import Bytes, Fields, PackedWeight, Reading, Scheme, row_chunks

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_EXPONENTS = "F8_E8M0"  # scales that are powers of two
#: Scales of what is not quantised here.
_OF_ACTIVATIONS = re.compile(r".+\.((input|output)_(scale|zero_point)|activation_scale)")
_OF_KV = re.compile(r".+\.[qkv]_(scale|zero_point)")


class Float8Scheme(Scheme):
    """quant_method "fp8": per tensor, per channel, or in blocks (weight_block_size)."""

    def __init__(self, fields: Fields) -> None:
        fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        self.block = read_block(fields, "weight_block_size")
        self._quantizes_kv = fields.get("kv_cache_scheme") is not None
        self.label = "FP8" if self.block is None else "FP8 in blocks of {}x{}".format(*self.block)

    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """One for each matrix of FP8."""
        for module in tensors.ending(".weight"):
            weight = f"{module}.weight"
            if tensors.dtype(weight) not in FLOAT8 or len(tensors.shape(weight)) != 2:
                continue
            inverse = f"{module}.weight_scale_inv"  # a name only: weights are multiplied by either
            scale = inverse if inverse in tensors else tensors.require(f"{module}.weight_scale", weight)
            shape = tensors.matrix(weight, FLOAT8)
            grids = [Grid.of(shape, None, None), Grid.of(shape, 1, None)]
            if self.block is not None:
                grids.append(Grid.of(shape, *self.block))
            yield Float8Weight(tensors, weight, scale, grids)

    def is_idle(self, name: str, tensors: PackedTensors) -> bool:
        """See Scheme."""
        return is_of_activations(name)

    def unapplied(self, tensors: PackedTensors) -> list[str]:
        """See Scheme."""
        return ["activations", *(["the KV cache"] if self._quantizes_kv or has_kv_scales(tensors) else [])]


class Float8Weight(PackedWeight):
    """A matrix and its scales. grids: what the scales may belong to; their shape says which."""

    def __init__(self, tensors: PackedTensors, name: str, scale: str, grids: list[Grid]) -> None:
        tensors.expect(scale, (*FLOATS, _EXPONENTS))
        found = counts(tensors.shape(scale))
        self._grid = next((grid for grid in grids if grid.cells == found), grids[0])
        if self._grid.cells != found:
            wanted = " or ".join(str(list(grid.cells)) for grid in grids)
            tensors.fail(scale, f"has shape {tensors.shape(scale)}; it must be {wanted}")
        super().__init__(name, self._grid.shape, {name, scale})
        self._tensors, self._scale = tensors, scale

    @functools.cached_property
    def reading(self) -> Reading:
        """See PackedWeight."""
        mantissas, exponents = np.frexp(np.abs(self._scales()))
        # Powers of two, far enough from the ends of bf16's range that no product leaves it.
        exact = ((mantissas == 0.5) & (np.abs(exponents) < 100)).all()
        return Reading("BF16", "bf16 exactly" if exact else "bf16, rounded to nearest")

    def rows(self) -> Bytes:
        """See PackedWeight."""
        codes = self._tensors.raw(self.name)
        decode = _values(self._tensors.dtype(self.name))
        scales, cells = self._grid.of_rows(self._scales()), self._grid.cell_of_columns()
        out = np.empty((self.shape[0], 2 * self.shape[1]), np.uint8)
        for start, stop in row_chunks(*self.shape):
            with np.errstate(all="ignore"):  # what is not finite is refused below
                values = decode[codes[start:stop]] * scales[start:stop, cells]
            rounded = round_to_bf16(values)
            if (rounded & 0x7F80 == 0x7F80).any():
                self._tensors.fail(self.name, "has weights that are not finite; the file is damaged")
            out[start:stop] = rounded.view(np.uint8)
        return out

    def _scales(self) -> npt.NDArray[np.float32]:
        if self._tensors.dtype(self._scale) != _EXPONENTS:
            return self._tensors.floats(self._scale)
        exponents = self._tensors.raw(self._scale)
        if (exponents == 255).any():
            self._tensors.fail(self._scale, "has values that are not finite; the file is damaged")
        return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


def read_block(fields: Fields, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None if there is none."""
    block = fields.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2:
        fields.refuse(key, "served are two numbers")
    for number in block:
        if type(number) is not int or not 1 <= number < 2**31:
            fields.refuse(key, "served are numbers of at least 1")
    return block[0], block[1]


def is_of_activations(name: str) -> bool:
    """Whether a tensor belongs to the quantisation of activations or of the KV cache."""
    return bool(_OF_ACTIVATIONS.fullmatch(name) or _OF_KV.fullmatch(name))


def has_kv_scales(tensors: PackedTensors) -> bool:
    """Whether there are scales for the KV cache."""
    return any(_OF_KV.fullmatch(name) for name in tensors.names)


@functools.cache
def _values(dtype: str) -> npt.NDArray[np.float32]:
    """What each byte stands for, f32 [256]."""
    codes = np.arange(256)
    if dtype == "F8_E5M2":  # the upper half of an f16
        return (codes << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    sign = np.where(codes & 128, -1.0, 1.0)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size[codes & 127 == 127] = np.nan
    return (sign * size).astype(np.float32)
