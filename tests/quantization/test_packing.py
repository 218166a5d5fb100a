"""Integers and scales against the gguf package's own dequantisation."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from octavo.errors import UnsupportedModelError
from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format
from octavo.quantization.packing import unpack_groups

OURS = NATIVE_TYPES[Format.Q8G16]
TYPES = [name for format_, name in NATIVE_TYPES.items() if format_.quantized and name != OURS]


def random_bytes(type_name: str, rows: int, groups: int) -> npt.NDArray[np.uint8]:
    """Every nibble and byte occurs; scales are any finite halves, negative and denormal ones too."""
    rng = np.random.default_rng(0)
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    raw = rng.integers(0, 256, (rows, groups, nbytes), dtype=np.uint8)
    num_scales = 2 if type_name == "Q4_1" else 1
    bits = rng.integers(0, 1 << 16, (rows, groups, num_scales), dtype=np.uint16)
    bits &= np.uint16(0b1_01111_1111111111)  # exponents below that of infinity
    raw[:, :, : 2 * num_scales] = bits.view(np.uint8).reshape(rows, groups, -1)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("rows", [1, 37])
def test_unpacking_is_exact(type_name: str, rows: int) -> None:
    raw = random_bytes(type_name, rows, 5)
    found = unpack_groups(type_name, raw)
    assert (found.q.dtype, found.q.shape) == (np.int8, (rows, 160))
    assert (found.d.dtype, found.d.shape) == (np.float32, (rows, 5))
    assert (found.m is None) == (type_name != "Q4_1")
    assert np.array_equal(found.values(), dequantize(raw, gguf.GGMLQuantizationType[type_name]))


@pytest.mark.parametrize("type_name", TYPES)
def test_quantised_weights(type_name: str) -> None:
    weights = np.random.default_rng(1).normal(size=(16, 96)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    raw = quantize(weights, kind)
    found = unpack_groups(type_name, raw)
    assert np.array_equal(found.values(), dequantize(raw, kind))
    low, high = {"Q4_0": (-8, 7), "Q4_1": (0, 15), "Q8_0": (-127, 127)}[type_name]
    assert (found.q.min(), found.q.max()) == (low, high)


def test_our_own_blocks_have_a_scale_for_each_half() -> None:
    rng = np.random.default_rng(2)
    scales = rng.normal(size=(5, 6)).astype(np.float16)
    quants = rng.integers(-128, 128, (5, 3, 32), dtype=np.int8)
    raw = np.concatenate([scales.view(np.uint8).reshape(5, 3, 4), quants.view(np.uint8)], axis=2).reshape(
        5, -1
    )
    found = unpack_groups(OURS, raw)
    assert found.m is None
    assert np.array_equal(found.q, quants.reshape(5, -1))
    expected = quants.reshape(5, 6, 16) * scales.astype(np.float32)[:, :, None]
    assert np.array_equal(found.values(), expected.reshape(5, -1))


@pytest.mark.parametrize("type_name", TYPES)
def test_views_of_a_file_are_left_alone(type_name: str) -> None:
    raw = random_bytes(type_name, 4, 2)
    shuffled = raw[[2, 0, 3, 1]]
    raw.flags.writeable = False
    assert np.array_equal(unpack_groups(type_name, raw).q[[2, 0, 3, 1]], unpack_groups(type_name, shuffled).q)
    found = unpack_groups(type_name, raw)
    assert found.q.flags.writeable  # torch warns about what is not
    assert found.d.flags.writeable


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"weights of type Q6_K have no quantised arithmetic"):
        unpack_groups("Q6_K", np.zeros((1, 210), np.uint8))


def test_formats_count_the_bytes_of_ggml() -> None:
    for format_, name in NATIVE_TYPES.items():
        if name == OURS:
            assert format_.group_nbytes == 36
            continue
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert format_.group_nbytes == nbytes * GROUP // block
    assert [f for f in Format if f.quantized] == [Format.Q4, Format.Q4M, Format.Q8, Format.Q8G16]
