"""Conversions against the gguf package's dequantisation, on random blocks of every type."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization import conversion
from octavo.quantization.conversion import convert, dequantize, pieces, requantize
from octavo.quantization.formats import (
    GROUP,
    NATIVE_TYPES,
    STORED_TYPES,
    Format,
    common_format,
    holds_exactly,
)
from octavo.quantization.packing import unpack_groups
from tiny_models import random_blocks

#: Not in every version of the gguf package that we run with.
RECENT = {"NVFP4", "Q1_0"}
TYPES = [name for name in STORED_TYPES if name not in RECENT]
ROUNDED = [name for name in TYPES if not STORED_TYPES[name].lossless]
#: Levels of what shares a scale, 64 if absent.
LEVELS = {"Q5_1": 32, "Q4_K": 16, "Q5_K": 32, "Q2_K": 4, "Q3_K": 8}
#: Weights that share a scale, 32 if absent.
SHARING = {Format.Q8G16: 16}
#: What keeps its integers, and rounds no more than scales and mins, by 2**-11 of themselves.
KEEPS_INTEGERS = ("Q4_K", "Q6_K")


@dataclass(frozen=True)
class Rows:
    """A tensor in memory."""

    type_name: str
    raw: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None

    def release(self) -> None:
        """There is no file to let go of."""


def value(raw: npt.NDArray[np.uint8], format_: Format) -> npt.NDArray[np.float32]:
    if not format_.quantized:
        return dequantize(raw, NATIVE_TYPES[format_])
    return unpack_groups(NATIVE_TYPES[format_], raw).values()


def theirs(type_name: str, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]).astype(np.float32)


@pytest.mark.parametrize("type_name", TYPES)
def test_dequantised_as_the_gguf_package_does(type_name: str) -> None:
    raw = random_blocks(type_name, 7, 512)
    assert np.array_equal(dequantize(raw, type_name), theirs(type_name, raw))


@pytest.mark.parametrize("type_name", [name for name in TYPES if STORED_TYPES[name].lossless])
def test_what_is_called_lossless_is(type_name: str) -> None:
    raw = random_blocks(type_name, 9, 512)
    format_ = STORED_TYPES[type_name].format
    assert np.array_equal(value(convert(raw, type_name, format_), format_), theirs(type_name, raw))


SCALES_ALONE = ["Q4_0", "TQ1_0", "TQ2_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"]


@pytest.mark.parametrize("format_", [Format.Q4M, Format.Q8, Format.Q8G16])
@pytest.mark.parametrize("type_name", SCALES_ALONE)
def test_what_has_scales_alone_is_exact_beside_a_wider_type(type_name: str, format_: Format) -> None:
    """Stacked to one matrix with tensors of another type, it is held in that one's format."""
    own = STORED_TYPES[type_name].format
    beside = next(name for name, held in STORED_TYPES.items() if held.format is format_)
    format_ = common_format([type_name, beside])
    assert holds_exactly(format_, type_name)
    raw = random_blocks(type_name, 9, 512)
    if type_name == "Q4_0":
        raw[3, :18] = 0
    assert own.quantized
    assert np.array_equal(value(convert(raw, type_name, format_), format_), theirs(type_name, raw))


@pytest.mark.parametrize("type_name", ROUNDED)
def test_the_added_error_is_far_below_the_types_own_step(type_name: str) -> None:
    """At most half a step of q8, of what shares a scale there. A type of n levels has steps of at least
    range / (n - 1), and no type has more than 64 levels; where the range spans zero it is at least the
    largest weight, 127 steps of q8. So even at 64 levels the error is below a third of the type's step:
    0.5 / (127 / 63) = 0.25. Types that keep their integers are off by 2**-11 of d q (at most 32 d) and of m
    (at most the range): by less than a thirtieth of a step."""
    format_ = STORED_TYPES[type_name].format
    raw = random_blocks(type_name, 64, 1024)
    before = theirs(type_name, raw).reshape(64, -1, SHARING.get(format_, GROUP))
    after = value(convert(raw, type_name, format_), format_).reshape(before.shape)
    error = np.abs(after.astype(np.float64) - before).max(axis=2)
    largest = np.abs(before).max(axis=2)
    half_step = largest / 127 / 2 * (1 + 2.0**-10) + 2.0**-25  # of f16 scales, rounded up
    assert (error <= half_step).all()
    spans_zero = (before.min(axis=2) <= 0) & (before.max(axis=2) >= 0) & (largest > 0)
    assert spans_zero.mean() > 0.3, "few groups of these are like weights"
    step = (before.max(axis=2) - before.min(axis=2)) / (LEVELS.get(type_name, 64) - 1)
    assert (error < step / (30 if type_name in KEEPS_INTEGERS else 3))[spans_zero].all()
    assert error.max() > 0, "nothing was rounded"


@pytest.mark.parametrize("type_name", KEEPS_INTEGERS)
def test_integers_that_are_kept_are_exact_where_f16_holds_their_scales(type_name: str) -> None:
    """Random bytes, but for f16 fields of few bits: then their products with 6-bit scales have at most 11."""
    raw = random_blocks(type_name, 16, 512)
    for at in (0, 2) if type_name == "Q4_K" else (208,):
        blocks = raw.reshape(-1, 144 if type_name == "Q4_K" else 210)
        blocks[:, at : at + 2] = np.array([0.15625], np.float16).view(np.uint8)
    format_ = STORED_TYPES[type_name].format
    assert np.array_equal(value(convert(raw, type_name, format_), format_), theirs(type_name, raw))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6, 1e-9, 8e6])
@pytest.mark.parametrize("format_", [Format.Q8, Format.Q8G16])
def test_every_magnitude_is_within_half_a_step(scale: float, format_: Format) -> None:
    values = (np.random.default_rng(3).uniform(-1, 1, (16, 96)) * scale).astype(np.float32)
    after = value(requantize(values, format_), format_)
    sharing = SHARING.get(format_, GROUP)
    step = np.repeat(np.abs(values).reshape(16, -1, sharing).max(axis=2), sharing, axis=1) / 127
    assert (np.abs(after - values) <= step * 0.5 * (1 + 2.0**-9) + 2.0**-25).all()


def test_zeros_stay_zeros_and_nan_stays_visible() -> None:
    values = np.ones((3, 64), np.float32)
    values[0, :GROUP] = 0
    values[1, 5], values[2, 40] = np.nan, -np.inf
    after = value(requantize(values), Format.Q8)
    assert (after[0, :GROUP] == 0).all()
    assert np.isnan(after[1, :GROUP]).all()
    assert np.isnan(after[2, GROUP:]).all()
    np.testing.assert_allclose(after[[0, 1, 2], [GROUP, GROUP, 0]], 1, rtol=1e-3)


def test_weights_beyond_f16_scales_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"weights as large as 1e\+07; the scales of q8 hold up to"):
        requantize(np.full((1, GROUP), 1e7, np.float32))
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = np.array([9000], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="a scale of 9000; q4m holds up to 8188"):
        convert(raw, "Q4_0", Format.Q4M)
    for type_name, at, name in (("Q4_K", 0, "q4m"), ("Q6_K", 208, "q8g16")):
        raw = random_blocks(type_name, 2, 256)
        raw[1, at : at + 2] = np.array([40000], np.float16).view(np.uint8)
        with pytest.raises(CheckpointError, match=rf"a scale or a min of .*; {name} holds up to 65504"):
            convert(raw, type_name, STORED_TYPES[type_name].format)


def test_a_format_too_narrow_is_refused() -> None:
    for type_name, format_ in (("Q8_0", Format.Q4M), ("Q4_1", Format.Q4), ("Q4_K", Format.Q4)):
        with pytest.raises(UnsupportedModelError, match=f"{type_name} can't be held as {format_}"):
            convert(random_blocks(type_name, 1, 256), type_name, format_)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "F32"])
def test_rows_that_need_no_change_are_the_files_own(type_name: str) -> None:
    raw = random_blocks(type_name, 4, 64)
    order = np.array([3, 1, 0, 2], np.int32)
    (piece,) = pieces(Rows(type_name, raw, order), STORED_TYPES[type_name].format)
    assert piece.raw is raw
    assert piece.row_order is order


def test_floats_at_odd_addresses_are_copied() -> None:
    values = np.arange(64, dtype=np.float32)
    odd = np.zeros(257, np.uint8)[1:].reshape(2, -1)
    odd[:] = values.view(np.uint8).reshape(2, -1)
    (piece,) = pieces(Rows("F32", odd), Format.F32)
    assert piece.raw.ctypes.data % 4 == 0
    assert np.array_equal(piece.raw.view(np.float32).reshape(-1), values)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "BF16", "Q4_1"])
def test_pieces_are_the_whole_in_order(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(type_name, 37, 256)
    order = np.random.default_rng(0).permutation(37).astype(np.int32)
    others = {"Q4_1": Format.F32, "BF16": Format.F32, "Q4_0": Format.Q4M}
    format_ = others.get(type_name, STORED_TYPES[type_name].format)
    whole = convert(raw, type_name, format_)[order]
    for weights in (1, 5000, 8000):
        monkeypatch.setattr(conversion, "PIECE_WEIGHTS", weights)
        found = list(pieces(Rows(type_name, raw, order), format_))
        assert len(found) > 1
        assert np.array_equal(np.concatenate([piece.raw for piece in found]), whole)


def test_memory_is_that_of_a_piece() -> None:
    raw = np.zeros((8192, 24 * 128), np.uint8)  # 32 M weights, 128 MiB as f32
    tracemalloc.start()
    try:
        for _ in pieces(Rows("Q5_1", raw), Format.Q8):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_a_matrix_takes_the_format_that_holds_all_its_parts() -> None:
    assert common_format(["Q4_0", "Q4_1"]) is Format.Q4M
    assert common_format(["Q4_1", "Q5_K"]) is Format.Q8
    assert common_format(["Q8_0", "Q6_K"]) is Format.Q8G16
    assert common_format(["Q4_K", "Q6_K", "Q4_0"]) is Format.Q8G16
    assert common_format(["Q8_0", "F16"]) is Format.F32
    assert not holds_exactly(Format.Q8G16, "Q4_1")
    assert not holds_exactly(Format.Q8G16, "Q6_K")
    assert holds_exactly(Format.F32, "Q6_K")
    assert not holds_exactly(Format.BF16, "F16")


@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_K", "Q5_K"])
def test_beside_types_of_16_all_others_are_within_half_a_step(type_name: str) -> None:
    raw = random_blocks(type_name, 8, 512)
    before = theirs(type_name, raw).reshape(-1, 16)
    after = value(convert(raw, type_name, Format.Q8G16), Format.Q8G16).reshape(-1, 16)
    half_step = np.abs(before).max(axis=1) / 254 * (1 + 2.0**-10) + 2.0**-25
    assert (np.abs(after - before).max(axis=1) <= half_step).all()


@pytest.mark.parametrize(("format_", "dtype"), [(Format.BF16, torch.bfloat16), (Format.F16, torch.float16)])
def test_plain_formats_round_as_torch_does(format_: Format, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(16, 64)) * 2.0 ** rng.integers(-20, 14, (16, 64))).astype(np.float32)
    values[0, :6] = 0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-30
    values[1] = np.frombuffer(np.uint32(0x3F808000).tobytes(), np.float32)[0]  # halfway between two bf16
    values.view(np.uint32)[2] = 0xFFFFFFFF  # a NaN that rounding would wrap to zero
    found = value(convert(values.view(np.uint8), "F32", format_), format_)
    assert np.array_equal(found, torch.from_numpy(values).to(dtype).float().numpy(), equal_nan=True)


def test_what_f16_does_not_reach_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"as large as 70000; f16 holds up to 65504.*--dtype bf16"):
        convert(np.full((1, 32), 7e4, np.float32).view(np.uint8), "F32", Format.F16)


def test_pages_are_let_go_of_behind_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("BF16", 40, 64)
    monkeypatch.setattr(conversion, "PIECE_WEIGHTS", 10 * 64)
    events: list[str] = []

    class Watched(Rows):
        def release(self) -> None:
            events.append("released")

    events.extend("packed" for _ in pieces(Watched("BF16", raw), Format.BF16))
    assert events == ["packed", "released"] * 4


@pytest.mark.parametrize("exponent", [0, 90, 103, 104, 128, 143, 144, 200])
def test_mxfp4_is_exact_where_f16_holds_its_scales(exponent: int) -> None:
    """Scales are 2 ** (exponent - 128); those too small for f16 belong to next to nothing."""
    raw = random_blocks("MXFP4", 4, 64)
    raw.reshape(4, 2, 17)[1, 1, 0] = exponent
    before = theirs("MXFP4", raw)
    if exponent > 128 + 20:
        with pytest.raises(CheckpointError, match="weights as large as"):
            convert(raw, "MXFP4", Format.Q8)
        return
    after = value(convert(raw, "MXFP4", Format.Q8), Format.Q8)
    if 104 <= exponent <= 143:
        assert np.array_equal(after, before)
    assert np.abs(after - before).max() <= np.abs(before).max() / 254 * 1.01
    raw.reshape(4, 2, 17)[1, 1, 0], raw.reshape(4, 2, 17)[1, 1, 1:] = 0, 0  # zeros, of a scale of 2 ** -128
    assert np.array_equal(value(convert(raw, "MXFP4", Format.Q8), Format.Q8), theirs("MXFP4", raw))
