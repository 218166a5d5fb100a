"""From any stored type to the rows a format is packed from.

Rule: exact wherever the format can hold the type exactly. Else either a type's scales and mins are rounded to
f16, by 2^-11 of themselves, and its integers stay; or each weight is rounded to the nearest that q8 or q8g16
has, half a step or 1/254 of the largest that shares its scale. Rows that need no change stay the file's own
bytes; the others are converted a few megabytes at a time.

    F16, BF16           -> F32    widened
    any plain type      -> F16, BF16   rounded to nearest, ties to even (only where that was asked for)
    TQ1_0, TQ2_0        -> Q4_0   w = d (q - 8) with q of 7, 8 and 9: the same d
    Q4_0                -> Q4_1   w = d (q - 8) = d q + m, with m = -8 d
    Q4_K                -> Q4_1   the same q; d and m of each 32 rounded to f16
    Q4_0, Q5_0, IQ4_NL  -> Q8_0   w = d q with integers q: the same d
    MXFP4               -> Q8_0   likewise, with powers of two d; exact for the 2^-24 to 2^15 that f16 holds
    Q6_K                -> Q8G16  the same q; d of each 16 rounded to f16
    any of the above    -> Q8G16  as Q8_0, with d twice
    everything else     -> Q8_0, Q8G16   dequantised, and as `quantize` says
    any plain type      -> Q4_0, Q4_1, Q8_0   as `quantize` says (only where that was asked for)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format
from octavo.quantization.packing import pack_nibbles
from octavo.quantization.quantize import (
    DAMAGED,
    Quantize,
    blocks_of_8_bits,
    check_reach,
    quantize,
    requantize,
)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

#: Rows are handed out in pieces of at most this many weights (16 MiB as f32), or of one row.
PIECE_WEIGHTS = 1 << 22
_PLAIN_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MOST_WEIGHTS_PER_BYTE = 6  # IQ1_S has 1.56 bits a weight
_Q4_0_NBYTES = 18
_Q4_K_NBYTES = 144
_MXFP4_NBYTES = 17
_MXFP4_BIAS = 128  # a block's first byte less this is the exponent of what its weights are multiples of
_F16_EXPONENTS = (-24, 15)  # of the powers of two that it holds
#: Where the f16 d lies in the blocks of types whose weights are d q, with integers |q| <= 127: bytes of a
#: block, bytes before d, weights.
_WHOLE_MULTIPLES = {
    "Q4_0": (_Q4_0_NBYTES, 0, 32),
    "Q5_0": (22, 0, 32),
    "IQ4_NL": (18, 0, 32),
    "Q8_0": (34, 0, 32),
    "TQ1_0": (54, 52, 256),
    "TQ2_0": (66, 64, 256),
}
#: Weights that share a scale.
_SHARING = {Format.Q8: GROUP, Format.Q8G16: GROUP // 2}


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


def pieces(rows: StoredRows, format_: Format, quantize: Quantize = quantize) -> Iterator[Piece]:
    """All rows of a tensor in the layout of a format, from the first to the last.

    quantize: makes quantised rows of plain ones. The file's pages are let go of behind each piece, so that
    loading takes no more memory than the weights.
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
            yield Piece(convert(some, type_name, format_, quantize), None)
        rows.release()


def _weights_of_row(raw: Bytes, type_name: str) -> int:
    """Weights of a row, or more than there are."""
    plain = _PLAIN_NBYTES.get(type_name)
    nbytes = int(raw.shape[1])
    return nbytes // plain if plain else nbytes * _MOST_WEIGHTS_PER_BYTE


def _is_aligned(raw: Bytes, format_: Format) -> bool:
    """Whether kernels may read these rows in place. Nothing makes a file keep its floats aligned."""
    return format_.quantized or raw.ctypes.data % format_.element_nbytes == 0


def convert(raw: Bytes, type_name: str, format_: Format, quantize: Quantize = quantize) -> Bytes:
    """Rows of one type as rows of NATIVE_TYPES[format].

    Raises UnsupportedModelError for a type that can't be read, or that the format is too narrow for, and
    CheckpointError for weights beyond what f16 scales reach.
    """
    if type_name == NATIVE_TYPES[format_]:
        return raw.copy()
    if not format_.quantized:
        return _plain(dequantize(raw, type_name), format_)
    if type_name in _PLAIN_NBYTES:
        values = dequantize(raw, type_name)
        check_reach(values, format_)
        return quantize(values, format_)
    if format_ in _SHARING:
        values = dequantize(raw, type_name)
        scales = _own_scales(raw, type_name, values, format_)
        return requantize(values, format_) if scales is None else _with_scales(values, scales, format_)
    if type_name in ("TQ1_0", "TQ2_0"):
        raw, type_name = _ternary_as_q4_0(raw, type_name), "Q4_0"
    if type_name == NATIVE_TYPES[format_]:
        return raw
    if format_ is Format.Q4M and type_name == "Q4_0":
        return _q4_0_as_q4_1(raw)
    if format_ is Format.Q4M and type_name == "Q4_K":
        return _q4_k_as_q4_1(raw)
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
    return _as_f16(
        values, "weights as large as {largest:g}; f16 holds up to 65504. Choose --dtype bf16 or f32"
    ).view(np.uint8)


def round_to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    """To the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # A NaN whose upper half is all ones would wrap to a number.
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _own_scales(raw: Bytes, type_name: str, values: Floats, format_: Format) -> Floats | None:
    """What each 32 or 16 weights are whole multiples of, f32 [N, parts]; None where a type is not like this,
    or the multiples are of another length."""
    rows, sharing = len(raw), _SHARING[format_]
    if type_name in _WHOLE_MULTIPLES:
        nbytes, before, weights = _WHOLE_MULTIPLES[type_name]
        d = np.ascontiguousarray(raw.reshape(rows, -1, nbytes)[:, :, before : before + 2])
        return np.repeat(d.view(np.float16)[:, :, 0].astype(np.float32), weights // sharing, axis=1)
    if type_name == "MXFP4":
        exponents = raw.reshape(rows, -1, _MXFP4_NBYTES)[:, :, 0].astype(np.int32) - _MXFP4_BIAS
        if not (exponents > _F16_EXPONENTS[1]).any() and not _lost(values, exponents):
            return np.repeat(np.ldexp(np.float32(1), exponents), GROUP // sharing, axis=1)
    if type_name == "Q6_K" and format_ is Format.Q8G16:
        # 128 bytes of low bits | 64 of high bits | 16 int8 scales | f16 d
        blocks = np.ascontiguousarray(raw).reshape(rows, -1, 210)
        d = blocks[:, :, 208:].copy().view(np.float16).astype(np.float32)
        scales = blocks[:, :, 192:208].view(np.int8).astype(np.float32)
        with np.errstate(all="ignore"):
            return (d * scales).reshape(rows, -1)
    return None


def _lost(values: Floats, exponents: npt.NDArray[np.int32]) -> bool:
    """Whether scales too small for f16 belong to weights that are not zero."""
    small = exponents < _F16_EXPONENTS[0]
    return bool(values.reshape(*exponents.shape, GROUP)[small].any())


def _with_scales(values: Floats, scales: Floats, format_: Format) -> Bytes:
    """Rows [N, K] to Q8_0 or Q8G16 with the scales [N, parts] that they are whole multiples of: a quotient
    that is an integer is not rounded. The scales are, to f16."""
    with np.errstate(all="ignore"):
        quants = values.reshape(*scales.shape, -1) / scales[:, :, None]
    return blocks_of_8_bits(_scales_as_f16(scales, format_), quants)


def _scales_as_f16(values: Floats, format_: Format) -> npt.NDArray[np.float16]:
    """Scales or mins, rounded to nearest. CheckpointError for those beyond f16's reach."""
    return _as_f16(values, f"a scale or a min of {{largest:g}}; {format_} holds up to 65504. {DAMAGED}")


def _as_f16(values: Floats, beyond: str) -> npt.NDArray[np.float16]:
    """Rounded to nearest. beyond: what the CheckpointError says that the weight has, where some are beyond
    f16's reach."""
    with np.errstate(all="ignore"):
        halves = values.astype(np.float16)
    if (np.isinf(halves) & np.isfinite(values)).any():
        largest = np.abs(values[np.isfinite(values)]).max()
        raise CheckpointError(f"it has {beyond.format(largest=largest)}")
    return halves


def _ternary_as_q4_0(raw: Bytes, type_name: str) -> Bytes:
    values = dequantize(raw, type_name)
    scales = _own_scales(raw, type_name, values, Format.Q8)
    assert scales is not None
    with np.errstate(all="ignore"):
        whole = np.nan_to_num(values.reshape(*scales.shape, GROUP) / scales[:, :, None])
    codes = (np.clip(whole, -8, 7) + 8).astype(np.uint8)
    head = scales.astype(np.float16)[:, :, None].view(np.uint8)
    return np.concatenate([head, pack_nibbles(codes)], axis=2).reshape(len(raw), -1)


def _q4_0_as_q4_1(raw: Bytes) -> Bytes:
    """Q4_0: f16 d | 16 bytes of nibbles, laid out as Q4_1's."""
    blocks = np.ascontiguousarray(raw).reshape(len(raw), -1, _Q4_0_NBYTES)
    d = blocks[:, :, :2].copy().view(np.float16)
    nibbles = blocks[:, :, 2:]
    with np.errstate(all="ignore"):
        m = d * np.float16(-8)
    if (np.isinf(m) & np.isfinite(d)).any():
        raise CheckpointError(
            f"it has a scale of {np.abs(d[np.isfinite(d)]).max():g}; q4m holds up to 8188. {DAMAGED}"
        )
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), nibbles], axis=2).reshape(len(raw), -1)


def _q4_k_as_q4_1(raw: Bytes) -> Bytes:
    """Q4_K: f16 d | f16 dmin | 12 bytes of 8 scales and 8 mins, w = d scale q - dmin min | 128 bytes: four
    times 32 weights in low nibbles, and the next 32 in high ones.

        bytes 0 .. 3    scale of group 0 .. 3; in the upper two bits those of scale 4 .. 7
        bytes 4 .. 7    min of group 0 .. 3;   in the upper two bits those of min 4 .. 7
        bytes 8 .. 11   lower four bits of scale 4 .. 7 | of min 4 .. 7
    """
    blocks = np.ascontiguousarray(raw).reshape(-1, _Q4_K_NBYTES)
    d, dmin = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    first, upper, lower = blocks[:, 4:12] & 63, blocks[:, 4:12] >> 6 << 4, blocks[:, 12:16]
    scales = np.concatenate([first[:, :4], upper[:, :4] | lower & 15], axis=1)
    mins = np.concatenate([first[:, 4:], upper[:, 4:] | lower >> 4], axis=1)
    with np.errstate(all="ignore"):
        head = np.stack([d[:, None] * scales, -dmin[:, None] * mins], axis=2)
    pairs = blocks[:, 16:].reshape(-1, 4, 1, GROUP)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, GROUP)
    halves = _scales_as_f16(head, Format.Q4M).view(np.uint8)
    return np.concatenate([halves, pack_nibbles(codes)], axis=2).reshape(len(raw), -1)
