"""From any stored type to the rows a format is packed from.

Rule: exact wherever the format can hold the type exactly; else each group of 32 is rounded to the
nearest value of q8, so that a weight moves by at most half of q8's step, 1/254 of the group's largest.
Rows that need no change stay the file's own bytes; the others are converted a few megabytes at a time.

    F16, BF16           -> F32    widened
    any plain type      -> F16, BF16   rounded to nearest, ties to even (only where that was asked for)
    Q4_0                -> Q4_1   w = d (q - 8) = d q + m, with m = -8 d
    Q4_0, Q5_0, IQ4_NL  -> Q8_0   w = d q with integers q: the same d
    MXFP4               -> Q8_0   likewise, with powers of two d; exact for the 2^-24 to 2^15 that f16 holds
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

#: Rows are handed out in pieces of at most this many weights (16 MiB as f32), or of one row.
PIECE_WEIGHTS = 1 << 22
_MOST_WEIGHTS_PER_BYTE = 6  # IQ1_S has 1.56 bits a weight
_LARGEST = 127
_Q4_0_NBYTES = 18
_MXFP4_NBYTES = 17
_MXFP4_BIAS = 128  # a block's first byte less this is the exponent of what its weights are multiples of
_F16_EXPONENTS = (-24, 15)  # of the powers of two that it holds
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
    def release(self) -> None:
        """Let go of the file's pages that were read; they are read again if they are needed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive output rows. raw: uint8 [rows, nbytes of a row], rows of NATIVE_TYPES[format];
    output row i is raw row row_order[i], or row i."""

    raw: Bytes
    row_order: npt.NDArray[np.int32] | None


def pieces(rows: StoredRows, format_: Format) -> Iterator[Piece]:
    """All rows of a tensor in the layout of a format, from the first to the last.

    The file's pages are let go of behind each piece, so that loading takes no more memory than the weights.
    """
    raw, order, type_name = rows.raw, rows.row_order, rows.type_name
    in_place = type_name == NATIVE_TYPES[format_] and _is_aligned(raw, format_)
    if in_place and order is not None:  # rows from all over the tensor
        yield Piece(raw, order)
        rows.release()
        return
    count = max(1, PIECE_WEIGHTS // _weights_of_row(raw, type_name))
    for start in range(0, len(raw), count):
        if in_place:
            yield Piece(raw[start : start + count], None)
        else:
            some = raw[start : start + count] if order is None else raw[order[start : start + count]]
            yield Piece(convert(some, type_name, format_), None)
        rows.release()


def _weights_of_row(raw: Bytes, type_name: str) -> int:
    """Weights of a row, or more than there are."""
    plain = {"F32": 4, "F16": 2, "BF16": 2}.get(type_name)
    nbytes = int(raw.shape[1])
    return nbytes // plain if plain else nbytes * _MOST_WEIGHTS_PER_BYTE


def _is_aligned(raw: Bytes, format_: Format) -> bool:
    """Whether kernels may read these rows in place. Nothing makes a file keep its floats aligned."""
    return format_.quantized or raw.ctypes.data % format_.element_nbytes == 0


def convert(raw: Bytes, type_name: str, format_: Format) -> Bytes:
    """Rows of one type as rows of NATIVE_TYPES[format].

    Raises UnsupportedModelError for a type that can't be read, or that the format is too narrow for, and
    CheckpointError for weights beyond what f16 scales reach.
    """
    if type_name == NATIVE_TYPES[format_]:
        return raw.copy()
    if not format_.quantized:
        return _plain(dequantize(raw, type_name), format_)
    if format_ is Format.Q8:
        values = dequantize(raw, type_name)
        if type_name in _WHOLE_MULTIPLES:
            scales = raw.reshape(len(raw), -1, _WHOLE_MULTIPLES[type_name])[:, :, :2]
            return _with_scales(values, np.ascontiguousarray(scales).view(np.float16)[:, :, 0])
        if type_name == "MXFP4":
            exponents = raw.reshape(len(raw), -1, _MXFP4_NBYTES)[:, :, 0].astype(np.int32) - _MXFP4_BIAS
            if not (exponents > _F16_EXPONENTS[1]).any() and not _lost(values, exponents):
                return _with_scales(values, np.ldexp(1.0, exponents).astype(np.float16))
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


def _plain(values: Floats, format_: Format) -> Bytes:
    """Rows [N, K] in a plain format. CheckpointError for weights beyond f16's reach."""
    if format_ is Format.F32:
        return values.view(np.uint8)
    if format_ is Format.BF16:
        return round_to_bf16(values).view(np.uint8)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if (np.isinf(halves) & np.isfinite(values)).any():
        largest = np.abs(values[np.isfinite(values)]).max()
        raise CheckpointError(
            f"it has weights as large as {largest:g}; f16 holds up to 65504. Choose --dtype bf16 or f32"
        )
    return halves.view(np.uint8)


def round_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """To the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # A NaN whose upper half is all ones would wrap to a number.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


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


def _lost(values: Floats, exponents: npt.NDArray[np.int32]) -> bool:
    """Whether scales too small for f16 belong to weights that are not zero."""
    small = exponents < _F16_EXPONENTS[0]
    return bool(values.reshape(*exponents.shape, GROUP)[small].any())


def _with_scales(values: Floats, scale: npt.NDArray[np.float16]) -> Bytes:
    """Rows [N, K] to Q8_0 with the scales of their groups [N, K / 32]. Exact: an f16 times an integer of 8
    bits is an f32, and a quotient that is an integer is not rounded."""
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
