"""From any stored type to the rows a format is packed from.

Rule: exact wherever the format can hold the type exactly; else each group of 32 is rounded to the
nearest value of q8, so that a weight moves by at most half of q8's step, 1/254 of the group's largest.
Rows that need no change stay the file's own bytes; the others are converted a few megabytes at a time.

    F16, BF16           -> F32    widened
    Q4_0                -> Q4_1   w = d (q - 8) = d q + m, with m = -8 d
    Q4_0, Q5_0, IQ4_NL  -> Q8_0   w = d q with integers q: the same d
    everything else     -> Q8_0   dequantised, then d = max |w| / 127, rounded up to f16; q = round(w / d)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: Rows are converted in pieces of at most this many weights (16 MiB as f32), or of one row.
PIECE_WEIGHTS = 1 << 22
_MOST_WEIGHTS_PER_BYTE = 6  # IQ1_S has 1.56 bits a weight
_LARGEST = 127
_Q4_0_NBYTES = 18
#: Bytes of a block of 32, of types whose weights are d q with integers |q| <= 127; d leads the block.
_WHOLE_MULTIPLES = {"Q4_0": _Q4_0_NBYTES, "Q5_0": 22, "IQ4_NL": 18}


class StoredRows(Protocol):
    """A tensor as a file stores it; see backends.base.WeightRows."""

    @property
    def type_name(self) -> str: ...
    @property
    def raw(self) -> Bytes: ...
    @property
    def row_order(self) -> npt.NDArray[np.int32] | None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive output rows. raw: uint8 [rows, nbytes of a row], rows of NATIVE_TYPES[format];
    output row i is raw row row_order[i], or row i."""

    raw: Bytes
    row_order: npt.NDArray[np.int32] | None


def pieces(rows: StoredRows, format_: Format) -> Iterator[Piece]:
    """All rows of a tensor in the layout of a format, from the first to the last."""
    raw, order, type_name = rows.raw, rows.row_order, rows.type_name
    if type_name == NATIVE_TYPES[format_] and _is_aligned(raw, format_):
        yield Piece(raw, order)
        return
    count = max(1, PIECE_WEIGHTS // (raw.shape[1] * _MOST_WEIGHTS_PER_BYTE))
    for start in range(0, len(raw), count):
        some = raw[start : start + count] if order is None else raw[order[start : start + count]]
        yield Piece(convert(some, type_name, format_), None)


def _is_aligned(raw: Bytes, format_: Format) -> bool:
    """Whether kernels may read these rows in place. Nothing makes a file keep its floats aligned."""
    return format_.quantized or raw.ctypes.data % 4 == 0


def convert(raw: Bytes, type_name: str, format_: Format) -> Bytes:
    """Rows of one type as rows of NATIVE_TYPES[format].

    Raises UnsupportedModelError for a type that can't be read, or that the format is too narrow for, and
    CheckpointError for weights beyond what f16 scales reach.
    """
    if type_name == NATIVE_TYPES[format_]:
        return raw.copy()
    if format_ is Format.F32:
        return dequantize(raw, type_name).view(np.uint8)
    if format_ is Format.Q8:
        values = dequantize(raw, type_name)
        if type_name in _WHOLE_MULTIPLES:
            return _with_scales(values, raw.reshape(len(raw), -1, _WHOLE_MULTIPLES[type_name])[:, :, :2])
        return requantize_q8(values)
    if type_name == "Q4_0":
        return _q4_0_as_q4_1(raw)
    raise UnsupportedModelError(f"weights of type {type_name} can't be held as {format_}")


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Rows as f32 [N, K], in memory of their own. A damaged file's scales may be inf or NaN: they show in
    the result."""
    if type_name == "F32":
        return raw.copy().view(np.float32)
    if type_name == "F16":
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    import gguf  # takes a while: only where it is needed

    with np.errstate(all="ignore"):
        try:
            values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
        except (NotImplementedError, KeyError) as error:
            raise UnsupportedModelError(
                f"stored as {type_name}, which this version of the gguf package can't dequantise; use a "
                "file quantised to another type"
            ) from error
    return np.array(values, dtype=np.float32)


def requantize_q8(values: Floats) -> Bytes:
    """Rows [N, K] to Q8_0, each weight within half a step. A group with a NaN or an inf becomes NaN."""
    groups = values.reshape(len(values), -1, GROUP)
    with np.errstate(all="ignore"):
        exact = np.abs(groups).max(axis=2) / np.float32(_LARGEST)
        scale = exact.astype(np.float16)
        # Rounding up keeps the largest weight in range, so that nothing is clipped.
        scale = np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.float16(np.inf)), scale)
        if (np.isinf(scale) & np.isfinite(exact)).any():
            raise CheckpointError(
                f"it has weights as large as {np.abs(values).max():g}; the scales of q8 hold up to "
                f"{_LARGEST * float(np.finfo(np.float16).max):g}. The file is damaged or its model diverged"
            )
        scale = np.where(np.isfinite(exact), scale, np.float16(np.nan))
        quants = np.rint(groups / scale.astype(np.float32)[:, :, None])
    return _q8_0(scale, quants).reshape(len(values), -1)


def _with_scales(values: Floats, scales: Bytes) -> Bytes:
    """Rows [N, K] to Q8_0 with the f16 scales of their groups, bytes [N, K / 32, 2]. Exact: an f16 times an
    integer of 8 bits is an f32, and a quotient that is an integer is not rounded."""
    scale = np.ascontiguousarray(scales).view(np.float16)[:, :, 0]
    with np.errstate(all="ignore"):
        quants = values.reshape(*scale.shape, GROUP) / scale.astype(np.float32)[:, :, None]
    return _q8_0(scale, quants).reshape(len(values), -1)


def _q8_0(scale: npt.NDArray[np.float16], quants: Floats) -> Bytes:
    """Blocks [N, groups, 34] of scales [N, groups] and whole numbers [N, groups, 32], of which those that a
    zero, a NaN or an inf made are 0."""
    head = np.ascontiguousarray(scale[:, :, None]).view(np.uint8)
    integers = np.nan_to_num(quants, nan=0.0, posinf=0.0, neginf=0.0).astype(np.int8)
    return np.concatenate([head, integers.view(np.uint8)], axis=2)


def _q4_0_as_q4_1(raw: Bytes) -> Bytes:
    """Q4_0: f16 d | 16 bytes of nibbles, laid out as Q4_1's."""
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, _Q4_0_NBYTES)
    d = blocks[:, :, :2].copy().view(np.float16)
    nibbles = blocks[:, :, 2:]
    with np.errstate(all="ignore"):
        m = d * np.float16(-8)
    if (np.isinf(m) & np.isfinite(d)).any():
        raise CheckpointError(
            f"it has a scale of {np.abs(d[np.isfinite(d)]).max():g}; q4m holds up to 8188. The file is "
            "damaged or its model diverged"
        )
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), nibbles], axis=2).reshape(len(raw), -1)
