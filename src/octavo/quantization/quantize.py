"""From f32 to integers with scales: rows of Q8_0, Q8G16, Q4_1 and Q4_0.

Rule: a weight goes to the nearest that its group's scale (and min) allow; those of 4 bits are chosen for the
least squared error. csrc/cpu/kernels/quantize_weights.hpp does the same operation for operation, with the
same bits: whoever changes one changes both.

    Q8_0, Q8G16   d = max |w| / 127, rounded up to f16; q = round(w / d)
    Q4_0          d = max |w| / t for t = 6.5, 6.75 .. 9.5, the best; q = round(w / d) in -8 .. 7, stored + 8
    Q4_1          three times from d = (max - min) / (15 + t), t of _SHRINKS, around the middle of the range:
                  round, and take the line d q + m nearest to the weights, twice; the best of all nine

d and m are rounded to f16 before weights are rounded with them; w / d is w (1 / d) in 4 bits. Sums over a
group halve it: elements i and i + 16 first, then i and i + 8, down to one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.quantization.formats import GROUP, Format
from octavo.quantization.packing import pack_nibbles

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
#: Quantises rows f32 [N, K] to rows of NATIVE_TYPES[format]: uint8 [N, nbytes of a row].
Quantize = Callable[[Floats, Format], Bytes]

_LARGEST = 127
_SHARING = {Format.Q8: GROUP, Format.Q8G16: GROUP // 2}
#: The largest weights that are quantised: their scales, and mins, are within f16.
_REACH = {Format.Q8: _LARGEST * 65504.0, Format.Q4: 6.5 * 65504.0, Format.Q4M: 32768.0}
#: What is added to the 15 steps of a range: then a few weights are clipped, which can serve the others.
_SHRINKS = (0.0, 1.0, 2.5)
_FITS = 2
_DIVISORS = np.arange(6.5, 9.75, 0.25, dtype=np.float32)
DAMAGED = "The file is damaged or its model diverged"


def quantize(values: Floats, format_: Format) -> Bytes:
    """Rows [N, K] as rows of Q8_0, Q4_1 or Q4_0. Values must have passed `check_reach`."""
    if format_ is Format.Q8:
        return requantize(values, format_)
    groups = values.reshape(-1, GROUP)
    head, codes = _q4(groups) if format_ is Format.Q4 else _q4m(groups)
    return np.concatenate([head.view(np.uint8), pack_nibbles(codes)], axis=1).reshape(len(values), -1)


def check_reach(values: Floats, format_: Format) -> None:
    """Raise CheckpointError for weights that are no numbers, or beyond what f16 scales reach."""
    low, high = values.min(initial=0), values.max(initial=0)
    if not np.isfinite([low, high]).all():
        raise CheckpointError(f"it has weights that are inf or NaN. {DAMAGED}")
    largest = max(-low, high)
    if largest > _REACH[format_]:
        raise CheckpointError(
            f"it has weights as large as {largest:g}; {format_} holds up to {_REACH[format_]:g}. {DAMAGED}"
        )


def requantize(values: Floats, format_: Format = Format.Q8) -> Bytes:
    """Rows [N, K] to Q8_0 or Q8G16, each weight within half a step. What shares a scale with a NaN or an inf
    becomes NaN."""
    groups = values.reshape(len(values), -1, _SHARING[format_])
    with np.errstate(all="ignore"):
        exact = np.abs(groups).max(axis=2) / np.float32(_LARGEST)
        scale = exact.astype(np.float16)
        # Rounding up keeps the largest weight in range, so that nothing is clipped.
        scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.float16(np.inf)), scale)
        if (np.isinf(scale) & np.isfinite(exact)).any():
            raise CheckpointError(
                f"it has weights as large as {np.abs(values).max():g}; the scales of {format_} hold up to "
                f"{_LARGEST * float(np.finfo(np.float16).max):g}. {DAMAGED}"
            )
        scale = np.where(np.isfinite(exact), scale, np.float16(np.nan))
        quants = np.rint(groups / scale.astype(np.float32)[:, :, None])
    return blocks_of_8_bits(scale, quants)


def blocks_of_8_bits(scale: Halves, quants: Floats) -> Bytes:
    """Rows of Q8_0 or Q8G16 of scales [N, parts] and whole numbers [N, parts, 32 or 16], of which those that
    a zero, a NaN or an inf made are 0."""
    rows = len(scale)
    integers = np.nan_to_num(quants, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int8)
    blocks = integers.reshape(rows, -1, GROUP).view(np.uint8)
    head = np.ascontiguousarray(scale).view(np.uint8).reshape(rows, blocks.shape[1], -1)
    return np.concatenate([head, blocks], axis=2).reshape(rows, -1)


def _q4(groups: Floats) -> tuple[Halves, Bytes]:
    """Scales [groups, 1] and codes [groups, 32]."""
    largest = np.abs(groups).max(axis=1, keepdims=True)
    best = np.zeros((len(groups), 1), np.float16)
    least = np.full((len(groups), 1), np.inf, np.float32)
    for divisor in _DIVISORS:
        d = (largest / divisor).astype(np.float16)
        wide = d.astype(np.float32)
        error = np.clip(np.rint(groups * _inverse(wide)), -8, 7) * wide - groups
        squared = _sum(error * error)
        best, least = np.where(squared < least, d, best), np.minimum(squared, least)
    codes = np.clip(np.rint(groups * _inverse(best.astype(np.float32))), -8, 7) + 8
    return best, codes.astype(np.uint8)


def _q4m(groups: Floats) -> tuple[Halves, Bytes]:
    """Scales and mins [groups, 2] and codes [groups, 32]."""
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    best = np.zeros((len(groups), 2), np.float16)
    least = np.full((len(groups), 1), np.inf, np.float32)
    total = _sum(groups)
    span = (high - low) + np.float32(0)  # never -0, whichever zero is the larger
    for shrink in _SHRINKS:
        d = span / np.float32(15 + shrink)
        m = low + (span - np.float32(15) * d) * np.float32(0.5)
        for fit in range(_FITS + 1):
            with np.errstate(over="ignore"):  # of a line that misses: it is not the best then
                rounded = np.concatenate([d, m], axis=1).astype(np.float16)
            wide = rounded.astype(np.float32)
            codes = _codes(groups, wide)
            error = (codes * wide[:, :1] + wide[:, 1:]) - groups
            squared = _sum(error * error)
            best, least = np.where(squared < least, rounded, best), np.minimum(squared, least)
            if fit < _FITS:
                d, m = _line(groups, codes, total, d, m)
    return best, _codes(groups, best.astype(np.float32)).astype(np.uint8)


def _codes(groups: Floats, wide: Floats) -> Floats:
    """Whole numbers 0 .. 15, of scales and mins [groups, 2]."""
    found: Floats = np.rint(np.clip((groups - wide[:, 1:]) * _inverse(wide[:, :1]), 0, 15))
    return found


def _line(groups: Floats, codes: Floats, total: Floats, d: Floats, m: Floats) -> tuple[Floats, Floats]:
    """The d and m of least squares for these codes; those there were where all codes are one."""
    sum_q, sum_qq, sum_wq = _sum(codes), _sum(codes * codes), _sum(codes * groups)
    spread = GROUP * sum_qq - sum_q * sum_q
    one = np.where(spread > 0, spread, np.float32(1))
    slope = (GROUP * sum_wq - total * sum_q) / one
    start = (total * sum_qq - sum_q * sum_wq) / one
    return np.where(spread > 0, slope, d), np.where(spread > 0, start, m)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _sum(values: Floats) -> Floats:
    """Sums over the last axis [groups, 1], in the module's order."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values
