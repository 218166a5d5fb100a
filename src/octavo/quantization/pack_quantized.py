"""Quantises weights to the layout that compressed-tensors calls "pack-quantized".

Rule: groups of 32 along K share a positive f16 scale; w = scale * q, symmetric, and q is stored with an
offset that makes it unsigned. What is written is what any reader of the format computes with.

    weight_packed   int32 [N, K * bits / 32]   words hold 8 (int4) or 4 (int8) values, the first lowest
    weight_scale    f16   [N, K / 32]
    weight_shape    int64 [2]                  N, K

    int4   q + 8   in 0..15   integers and scales of Q4_0, as `quantize` chooses them
    int8   q + 128 in 1..255  of Q8_0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format
from octavo.quantization.packing import unpack_groups
from octavo.quantization.quantize import Quantize, check_reach, quantize

Floats = npt.NDArray[np.float32]

#: Bits of a weight, by what the command calls it.
BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows. packed: int32 [rows, K * bits / 32]; scale: f16 [rows, K / 32]. squared_error and
    squared_norm: sums over all weights, for a relative error of the whole."""

    packed: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float16]
    squared_error: float
    squared_norm: float


def pack_rows(values: Floats, bits: int, quantize: Quantize = quantize) -> PackedRows:
    """Quantise rows [N, K], K a multiple of 32, to 4 or 8 bits.

    Raises CheckpointError for weights that are no numbers, or beyond what f16 scales reach.
    """
    format_ = Format.Q4 if bits == 4 else Format.Q8
    check_reach(values, format_)
    raw = quantize(values, format_)
    groups = unpack_groups(NATIVE_TYPES[format_], raw)
    return PackedRows(
        packed=_pack(groups.q, bits),
        scale=raw.reshape(len(raw), -1, format_.group_nbytes)[:, :, :2].copy().view(np.float16)[:, :, 0],
        squared_error=_sum_of_squares(groups.values() - values),
        squared_norm=_sum_of_squares(values),
    )


def _pack(quants: npt.NDArray[np.int8], bits: int) -> npt.NDArray[np.int32]:
    unsigned = (quants + np.int8(8)).view(np.uint8) if bits == 4 else quants.view(np.uint8) ^ 0x80
    if bits == 4:
        unsigned = unsigned[:, 0::2] | np.left_shift(unsigned[:, 1::2], 4, dtype=np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4")


def _sum_of_squares(values: Floats) -> float:
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))


def quantization_config(bits: int, ignore: list[str]) -> dict[str, object]:
    """What config.json says under "quantization_config", as compressed-tensors writes it.

    ignore: the modules that have a matrix and keep it as it is.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "observer": "mse" if bits == 4 else "minmax",
        "actorder": None,
        "block_structure": None,
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
