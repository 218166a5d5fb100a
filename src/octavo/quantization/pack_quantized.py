"""Quantises weights to the layout that compressed-tensors calls "pack-quantized".

Rule: groups of 32 along K share a positive f16 scale; w = scale * q, symmetric, and q is stored with an
offset that makes it unsigned. What is written is what any reader of the format computes with.

    weight_packed   int32 [N, K * bits / 32]   words hold 8 (int4) or 4 (int8) values, the first lowest
    weight_scale    f16   [N, K / 32]
    weight_shape    int64 [2]                  N, K

    int4   q + 8   in 0..15   the scale of least squared error among max |w| / d, d in 6.5..9.5
    int8   q + 128 in 1..255  max |w| / 127, rounded up so that nothing is clipped
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.quantization.formats import GROUP

Floats = npt.NDArray[np.float32]

#: Bits of a weight, by what the command calls it.
BITS = {"int4": 4, "int8": 8}
#: Divisors of a group's largest weight. Up to 8 they may clip a little, which can serve the others better.
_DIVISORS = np.arange(6.5, 9.75, 0.25, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows. packed: int32 [rows, K * bits / 32]; scale: f16 [rows, K / 32]. squared_error and
    squared_norm: sums over all weights, for a relative error of the whole."""

    packed: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float16]
    squared_error: float
    squared_norm: float


def pack_rows(values: Floats, bits: int) -> PackedRows:
    """Quantise rows [N, K], K a multiple of 32, to 4 or 8 bits.

    Raises CheckpointError for weights that are no numbers, or beyond what f16 scales reach.
    """
    rows, width = values.shape
    groups = values.reshape(-1, GROUP)
    if not np.isfinite(groups).all():
        raise CheckpointError("it has weights that are inf or NaN; the file is damaged or its model diverged")
    scale = _scales_of_4_bits(groups) if bits == 4 else _scales_of_8_bits(groups)
    quants = _quantise(groups, scale, bits)
    error = quants * scale.astype(np.float32)[:, None] - groups
    return PackedRows(
        packed=_pack(quants, bits).reshape(rows, width * bits // 32),
        scale=scale.reshape(rows, -1),
        squared_error=_sum_of_squares(error),
        squared_norm=_sum_of_squares(groups),
    )


def _scales_of_8_bits(groups: Floats) -> npt.NDArray[np.float16]:
    exact = np.abs(groups).max(axis=1) / np.float32(127)
    scale = _as_f16(exact)
    return np.where(scale.astype(np.float32) < exact, np.nextafter(scale, np.float16(np.inf)), scale)


def _scales_of_4_bits(groups: Floats) -> npt.NDArray[np.float16]:
    largest = np.abs(groups).max(axis=1)
    best = np.zeros(len(groups), np.float16)
    least = np.full(len(groups), np.inf, np.float32)
    for divisor in _DIVISORS:
        scale = _as_f16(largest / divisor)
        error = _quantise(groups, scale, 4) * scale.astype(np.float32)[:, None] - groups
        squared = np.einsum("ij,ij->i", error, error)
        better = squared < least
        best[better], least[better] = scale[better], squared[better]
    return best


def _as_f16(values: Floats) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        scale = values.astype(np.float16)
    if np.isinf(scale).any():
        raise CheckpointError(
            f"it has weights that need a scale of {values.max():g}; f16 holds up to 65504. The file is "
            "damaged or its model diverged"
        )
    return scale


def _quantise(groups: Floats, scale: npt.NDArray[np.float16], bits: int) -> Floats:
    """Whole numbers [groups, 32] that fit the bits; 0 where the scale is 0."""
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)
    half = 1 << (bits - 1)
    quants: Floats = np.clip(np.rint(groups * inverse[:, None]), -half, half - 1)
    return quants


def _pack(quants: Floats, bits: int) -> npt.NDArray[np.int32]:
    unsigned = (quants + (1 << (bits - 1))).astype(np.uint8)
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
