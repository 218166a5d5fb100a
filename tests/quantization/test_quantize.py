"""Quantising weights: the library against numpy bit for bit, and both against brute force."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from octavo.backends.native import library
from octavo.backends.native.library import Isa
from octavo.backends.native.quantizer import quantize_with, quantizer
from octavo.errors import CheckpointError
from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format
from octavo.quantization.packing import unpack_groups
from octavo.quantization.quantize import check_reach, quantize

F32Array = npt.NDArray[np.float32]
FORMATS = [Format.Q8, Format.Q4, Format.Q4M]
needs_library = pytest.mark.skipif(not library.available(), reason="the native library is not built")


def value(raw: npt.NDArray[np.uint8], format_: Format) -> F32Array:
    return unpack_groups(NATIVE_TYPES[format_], raw).values()


def random_rows(rows: int = 60, width: int = 256, seed: int = 0) -> F32Array:
    """Rows of all magnitudes, and what is special: constants, zeros, one sign, ties, the largest."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (rows, width)) * np.exp(rng.normal(0, 4, (rows, 1)))
    values = np.clip(values, -3e4, 3e4)
    values[0] = 0
    values[10, :64] = np.where(np.arange(64) % 3, -0.0, 0.0)
    values[1] = 0.7
    values[2] = np.abs(values[2])
    values[3] = -np.abs(values[3])
    values[4] = np.rint(values[4])
    values[5, ::2] = 0
    values[6] = 32768 * np.sign(values[6])
    values[7] *= 1e-7 / np.abs(values[7]).max()
    values[8] *= 1e-40 / np.abs(values[8]).max()
    values[9, 40] = 1e4
    return values.astype(np.float32)


@needs_library
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("isa", [Isa.SCALAR, Isa.AUTO])
def test_the_library_has_numpys_bits(format_: Format, isa: Isa) -> None:
    loaded = library.load()
    for threads in (1, 3):
        context = loaded.octavo_create(isa, threads)
        for values in (random_rows(), random_rows()[20:21, :32], random_rows(19, 96, 2)[:, 32:]):
            found = quantize_with(loaded, context, values, format_)
            assert np.array_equal(found, quantize(values, format_))
        loaded.octavo_destroy(context)


@needs_library
@settings(max_examples=60)
@given(arrays(np.float32, (3, 64), elements=st.floats(-32768, 32768, width=32)))
def test_so_it_has_for_any_weights(values: F32Array) -> None:
    with quantizer(1) as native:
        for format_ in FORMATS:
            assert np.array_equal(native(values, format_), quantize(values, format_))


def test_without_the_library_it_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "available", lambda: False)
    with quantizer(2) as found:
        assert found is quantize


@pytest.mark.parametrize("format_", FORMATS)
def test_what_the_format_holds_is_kept(format_: Format) -> None:
    """Groups with a power of two for a step, and both ends of the range in use."""
    rng = np.random.default_rng(3)
    low, high = {Format.Q8: (-127, 127), Format.Q4: (-8, 7), Format.Q4M: (0, 15)}[format_]
    codes = rng.integers(low, high + 1, (40, GROUP))
    codes[:, 0], codes[:, 1] = low, high
    values = codes * 2.0 ** rng.integers(-12, 4, (40, 1))
    if format_ is Format.Q4M:
        values -= 7 * 2.0**-12
    if format_ is Format.Q4:
        values /= 2  # within the scales that are tried: 8 halves are the largest weight by 8
    values = values.astype(np.float32).reshape(8, -1)
    np.testing.assert_array_equal(value(quantize(values, format_), format_), values)


def test_4_bits_with_mins_are_nearly_the_best_there_is() -> None:
    """Against every range within the group's, in 60 x 60 steps."""
    groups = np.random.default_rng(4).normal(0, 0.1, (40, GROUP)).astype(np.float32)
    ours = ((value(quantize(groups, Format.Q4M), Format.Q4M) - groups) ** 2).sum(axis=1)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    least = np.full(len(groups), np.inf)
    for cut_low in np.linspace(-0.05, 0.3, 60):
        for cut_high in np.linspace(-0.05, 0.3, 60):
            m = low + cut_low * (high - low)
            d = (high - cut_high * (high - low) - m) / 15
            after = np.clip(np.rint((groups - m) / d), 0, 15) * d + m
            least = np.minimum(least, ((after - groups) ** 2).sum(axis=1))
    assert ours.sum() < 1.08 * least.sum()
    plain = (high - low) / 15
    rounded = np.rint((groups - low) / plain) * plain + low
    assert ours.sum() < 0.9 * ((rounded - groups) ** 2).sum()


def test_mins_serve_better_than_scales_alone() -> None:
    values = np.random.default_rng(5).normal(0, 0.1, (64, 512)).astype(np.float32)
    with_mins, without = (
        np.linalg.norm(value(quantize(values, f), f) - values) for f in (Format.Q4M, Format.Q4)
    )
    assert with_mins < 0.85 * without


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -1e8])
def test_what_no_scale_reaches_is_refused(format_: Format, bad: float) -> None:
    values = np.zeros((2, 64), np.float32)
    values[1, 40] = bad
    with pytest.raises(CheckpointError, match="damaged or its model diverged"):
        check_reach(values, format_)
    check_reach(np.zeros((0, 32), np.float32), format_)
