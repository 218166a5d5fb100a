"""Weights that are integers with scales, in groups along K: as rows of Q4_0, Q4_1 or Q8_0 where those do.

    w[n, k] = s[n, g] (q[n, k] - z[n, g]),   g = group_of[k]

Rule: a group that Octavo's groups of 32 divide only repeats its scale in each.

    q of 4 bits, z = 8     -> Q4_0   d = s
    q of 4 bits            -> Q4_1   d = s, m = -s z
    q - z within an int8   -> Q8_0   d = s
    anything else          -> F16    s (q - z), rounded to nearest
    beyond f16             -> F32    s (q - z)

Scales of f16 stay as they are in the first three; others are rounded, by at most 2^-11 of themselves. Where
f16 is coarser than 2^-10 of a scale or of a weight (below its normal numbers, above its largest), a later row
of the table serves.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.quantization.formats import GROUP
from octavo.quantization.packing import pack_nibbles
from octavo.weights.quantized.scheme import Bytes, PackedWeight, Reading, row_chunks

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Integers = npt.NDArray[Any]
_COARSEST = np.float32(2.0**-10)
_SMALLEST_NORMAL = 2.0**-14
_LARGEST = 65504.0


class IntegerWeight(PackedWeight):
    """bits: of q. signed: whether q is centred at 0, rather than at 2^(bits - 1)."""

    bits: int
    signed: bool = False

    @property
    def middle(self) -> int:
        """The zero point of symmetric quantisation."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @abc.abstractmethod
    def codes(self, start: int, stop: int) -> Integers:
        """q of these rows, uint8 [stop - start, K], or int8 if signed. start is a multiple of 32."""

    @abc.abstractmethod
    def scales(self) -> Floats:
        """s [rows, groups], finite."""

    @abc.abstractmethod
    def zeros(self) -> Integers:
        """z [rows, groups], of at most 16 bits."""

    @abc.abstractmethod
    def group_of(self) -> Integers:
        """The group of each column, [K], within the groups there are."""

    @functools.cached_property
    def reading(self) -> Reading:
        """See the module's table."""
        scales, zeros = self.scales(), self.zeros()
        if _divide_groups(self.group_of()):
            d = _halves(scales)
            close = _closeness(d, scales)
            symmetric = bool((zeros == self.middle).all())
            if close and symmetric:
                four = self.bits == 4
                return Reading("Q4_0" if four else "Q8_0", f"{'q4' if four else 'q8'}{_HOW[close]}")
            if self.bits == 4:
                close = min(close, _closeness(_offsets(d, zeros), _products(d, zeros)))
                if close:
                    return Reading("Q4_1", _Q4_1_HOW[close])
        size = np.abs(scales)
        span = (1 << self.bits) + int(np.abs(zeros).max())
        if ((size == 0) | (size >= _SMALLEST_NORMAL)).all() and size.max() * span <= _LARGEST:
            return Reading("F16", "f16, rounded to nearest")
        return Reading("F32", "f32")

    def rows(self) -> Bytes:
        """See the module's table."""
        scales, zeros, group_of = self.scales(), self.zeros(), self.group_of()
        nbytes, encode = _ENCODERS[self.type_name]
        num_rows, width = self.shape
        out = np.empty((num_rows, width * nbytes // GROUP), np.uint8)
        for start, stop in row_chunks(num_rows, width):
            codes = self.codes(start, stop)
            out[start:stop] = encode(codes, scales[start:stop], zeros[start:stop], group_of)
        return out


_ROUNDED, _EXACT = 1, 2
_Q4_1_HOW = {_ROUNDED: "q4m, scales and offsets rounded to f16", _EXACT: "q4m exactly"}
_HOW = {_ROUNDED: ", scales rounded to f16", _EXACT: " exactly"}


def _closeness(halves: Halves, exact: Floats) -> int:
    """_EXACT, _ROUNDED, or 0 where f16 is too coarse for one of them."""
    found = halves.astype(np.float32)
    if (found == exact).all():
        return _EXACT
    with np.errstate(invalid="ignore"):
        return _ROUNDED if (np.abs(found - exact) <= _COARSEST * np.abs(exact)).all() else 0


def _divide_groups(group_of: Integers) -> bool:
    """Whether each 32 columns are of one group."""
    if len(group_of) % GROUP:
        return False
    blocks = group_of.reshape(-1, GROUP)
    return bool((blocks == blocks[:, :1]).all())


def _halves(values: Floats) -> Halves:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def _products(d: Halves, zeros: Integers) -> Floats:
    """-d z, exact: 11 bits times at most 9."""
    return -d.astype(np.float32) * zeros.astype(np.float32)


def _offsets(d: Halves, zeros: Integers) -> Halves:
    """m, of the scale as it is held, so that a weight of 0 is at most m's rounding away from it."""
    with np.errstate(invalid="ignore"):  # an infinite d times 0
        return _halves(_products(d, zeros))


def _as_q4_0(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Bytes:
    head = _halves(scales)[:, group_of[::GROUP], None].view(np.uint8)
    nibbles = pack_nibbles(codes.reshape(len(codes), -1, GROUP))
    return np.concatenate([head, nibbles], axis=2).reshape(len(codes), -1)


def _as_q4_1(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Bytes:
    d = _halves(scales)
    head = np.stack([d, _offsets(d, zeros)], axis=2)[:, group_of[::GROUP]].view(np.uint8)
    nibbles = pack_nibbles(codes.reshape(len(codes), -1, GROUP))
    return np.concatenate([head, nibbles], axis=2).reshape(len(codes), -1)


def _as_q8_0(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Bytes:
    head = _halves(scales)[:, group_of[::GROUP], None].view(np.uint8)
    quants = codes.astype(np.int16) - zeros[:, group_of].astype(np.int16)
    blocks = quants.astype(np.int8).view(np.uint8).reshape(len(codes), -1, GROUP)
    return np.concatenate([head, blocks], axis=2).reshape(len(codes), -1)


def _as_f32(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Bytes:
    return _values(codes, scales, zeros, group_of).view(np.uint8)


def _as_f16(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Bytes:
    return _values(codes, scales, zeros, group_of).astype(np.float16).view(np.uint8)


def _values(codes: Integers, scales: Floats, zeros: Integers, group_of: Integers) -> Floats:
    return scales[:, group_of] * (codes.astype(np.float32) - zeros[:, group_of].astype(np.float32))


#: Bytes of 32 weights, and what writes them.
_ENCODERS: dict[str, tuple[int, Callable[[Integers, Floats, Integers, Integers], Bytes]]] = {
    "Q4_0": (18, _as_q4_0),
    "Q4_1": (20, _as_q4_1),
    "Q8_0": (34, _as_q8_0),
    "F16": (64, _as_f16),
    "F32": (128, _as_f32),
}


def unpack(words: Integers, bits: int) -> npt.NDArray[np.uint8]:
    """Fields of 4 or 8 bits of int32 [rows, columns], the lowest first: uint8 [rows, columns * 32 / bits]."""
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)
