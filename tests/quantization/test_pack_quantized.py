"""Packing to compressed-tensors' layout: against that library, and against brute force over scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError
from octavo.quantization.formats import GROUP
from octavo.quantization.pack_quantized import pack_rows, quantization_config

BITS = [4, 8]


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Signed values from words, by the definition: value i of a word is its bits [i * bits, (i + 1) * "
    "bits)."""
    words = packed.view(np.uint32)
    fields = [words >> np.uint32(shift) & np.uint32((1 << bits) - 1) for shift in range(0, 32, bits)]
    return np.stack(fields, axis=-1).reshape(len(packed), -1).astype(np.int64) - (1 << (bits - 1))


def values_of(packed: Any, bits: int) -> np.ndarray:
    groups = unpacked(packed.packed, bits).reshape(len(packed.packed), -1, GROUP)
    return (groups * packed.scale.astype(np.float64)[:, :, None]).reshape(len(packed.packed), -1)


def random_rows(rows: int = 24, width: int = 256, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows_of = rng.normal(0, 1, (rows, width)) * np.exp(rng.normal(0, 2, (rows, 1)))
    rows_of[3] = 0  # a scale of 0
    rows_of[4, :32] = 0
    rows_of[5] = rows_of[5, 0]  # all alike
    rows_of[6] *= 1e-7 / np.abs(rows_of[6]).max()  # scales below f16's normal numbers
    return rows_of.astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
def test_the_error_is_what_it_says_and_small(bits: int) -> None:
    values = random_rows()
    packed = pack_rows(values, bits)
    error = values_of(packed, bits) - values.astype(np.float64)
    assert packed.squared_error == pytest.approx((error**2).sum(), rel=1e-4)
    assert packed.squared_norm == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert (values_of(packed, bits)[3] == 0).all()
    if bits == 8:  # half a step, whose scale f16 rounds up by at most 2^-10 of it, or to its least number
        largest = np.abs(values.reshape(len(values), -1, GROUP)).max(axis=2)
        step = largest / 127 * (1 + 2**-10) + 2.0**-24
        assert (np.abs(error).reshape(len(values), -1, GROUP) <= step[:, :, None] / 2 * (1 + 1e-6)).all()


def test_the_scale_of_4_bits_is_nearly_the_best_there_is() -> None:
    values = random_rows(seed=1)[8:]
    groups = values.reshape(-1, GROUP).astype(np.float64)
    packed = pack_rows(values, 4)
    ours = ((values_of(packed, 4) - values).reshape(-1, GROUP) ** 2).sum(axis=1)
    largest = np.abs(groups).max(axis=1)
    least = np.full(len(groups), np.inf)
    for divisor in np.linspace(5, 12, 400):
        scale = (largest / divisor).astype(np.float16).astype(np.float64)[:, None]
        error = (np.clip(np.rint(groups / scale), -8, 7) * scale - groups) ** 2
        least = np.minimum(least, error.sum(axis=1))
    assert (ours >= least * (1 - 1e-3)).all()
    assert ours.sum() <= 1.05 * least.sum()
    plain = (largest / 7).astype(np.float16).astype(np.float64)[:, None]
    assert ours.sum() < 0.95 * ((np.rint(groups / plain) * plain - groups) ** 2).sum()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_no_scale_reaches_is_refused(bits: int, value: float) -> None:
    values = np.zeros((2, 64), np.float32)
    values[1, 40] = value
    with pytest.raises(CheckpointError, match="damaged or its model diverged"):
        pack_rows(values, bits)


@pytest.mark.parametrize("bits", BITS)
def test_compressed_tensors_reads_the_same_weights(bits: int) -> None:
    pytest.importorskip("compressed_tensors", reason="the library of the layout is not installed")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(quantization_config(bits, ["lm_head"]))
    values = random_rows(seed=2)
    packed = pack_rows(values, bits)
    tensors = {
        "weight_packed": torch.from_numpy(packed.packed),
        "weight_scale": torch.from_numpy(packed.scale),
        "weight_shape": torch.tensor(values.shape),
    }
    read = PackedQuantizationCompressor.decompress(tensors, config.config_groups["group_0"])["weight"]
    expected = values_of(packed, bits).astype(np.float16)  # it multiplies in the scales' type
    np.testing.assert_array_equal(read.numpy(), expected)
