"""Rotary tables, in float64, and the ways in which models stretch them.

Rule: one table for every device and every step; angles are never recomputed in lower precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.program.ir import RopeTable

#: Ways of stretching that are served; see `rope_frequencies`.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
#: Bounds of every parameter: angles stay finite within them.
_SMALLEST, _LARGEST = 1e-9, 1e15


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """Radians per position of each pair, and what cos and sin are multiplied with.

    boundary: sequences of more tokens turn by long_inv_freq, from their first token on.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    boundary: int | None = None
    long_inv_freq: tuple[float, ...] = ()


def inverse_frequencies(rotary_dim: int, theta: float) -> tuple[float, ...]:
    """theta ** (-2 i / rotary_dim) for i < rotary_dim / 2: radians per position (Su et al., RoFormer)."""
    return tuple(theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2))


def rope_frequencies(
    rotary_dim: int, rope: Mapping[str, Any], max_positions: int, max_model_len: int
) -> RopeFrequencies:
    """The frequencies that a config's rope parameters (Hugging Face's keys) describe.

    UnsupportedModelError for a type not in ROPE_TYPES, CheckpointError for parameters that are missing or
    make no sense. max_positions: what the config says the model was trained for, after stretching.
    max_model_len: the longest sequence to be served.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    plain = inverse_frequencies(rotary_dim, _number(rope, "rope_theta", least=1.0))
    if kind == "default":
        return RopeFrequencies(plain)
    if kind == "linear":  # Chen et al., "Extending context window ... via positional interpolation"
        factor = _number(rope, "factor")
        return RopeFrequencies(tuple(f / factor for f in plain))
    if kind == "llama3":
        return _llama3(plain, rope)
    if kind == "yarn":
        return _yarn(plain, rope, max_positions)
    if kind == "longrope":
        return _longrope(plain, rope, max_positions, max_model_len)
    raise UnsupportedModelError(
        f"rope type {str(kind)[:80]!r} is not served; served: {', '.join(ROPE_TYPES)}. Its frequencies would "
        "be wrong"
    )


def _number(rope: Mapping[str, Any], key: str, *, least: float = _SMALLEST) -> float:
    """A number of the parameters; CheckpointError where it is missing or makes no sense."""
    value = rope.get(key)
    if value is None:
        raise CheckpointError(f"rope parameter {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _LARGEST:
        raise CheckpointError(
            f"rope parameter {key!r} is {str(value)[:200]!r}; only a number in {least:g}..{_LARGEST:g} makes "
            "sense"
        )
    return float(value)


def _optional(rope: Mapping[str, Any], key: str, default: float) -> float:
    return default if rope.get(key) is None else _number(rope, key)


def _llama3(plain: tuple[float, ...], rope: Mapping[str, Any]) -> RopeFrequencies:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, original = _number(rope, "factor"), _number(rope, "original_max_position_embeddings")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"rope parameter 'low_freq_factor' is {low}, not less than 'high_freq_factor', {high}"
        )

    def stretched(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)  # in the original context
        if turns > high:
            return frequency
        if turns < low:
            return frequency / factor
        kept = (turns - low) / (high - low)
        return (1 - kept) * frequency / factor + kept * frequency

    return RopeFrequencies(tuple(map(stretched, plain)))


def _yarn(plain: tuple[float, ...], rope: Mapping[str, Any], max_positions: int) -> RopeFrequencies:
    """Peng et al., "YaRN": pairs that turn often in the original context are kept, those that turn
    rarely stretched, and attention is sharpened by a factor that grows with the stretch."""
    original = _optional(rope, "original_max_position_embeddings", max_positions)
    factor = _optional(rope, "factor", max_positions / original)
    theta, dim = _number(rope, "rope_theta", least=1.001), 2 * len(plain)

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(_optional(rope, "beta_fast", 32)), pair_of(_optional(rope, "beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001
    stretched = []
    for i, frequency in enumerate(plain):
        share = min(max((i - first) / width, 0.0), 1.0)
        stretched.append(frequency / factor * share + frequency * (1 - share))
    return RopeFrequencies(tuple(stretched), _yarn_attention(factor, rope))


def _yarn_attention(factor: float, rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")

    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpening(_number(rope, "mscale")) / sharpening(_number(rope, "mscale_all_dim"))
    return sharpening(1.0)


def _longrope(
    plain: tuple[float, ...], rope: Mapping[str, Any], max_positions: int, max_model_len: int
) -> RopeFrequencies:
    """Ding et al., "LongRoPE": a factor for each pair, other ones for sequences beyond the original
    context."""
    original = int(_number(rope, "original_max_position_embeddings", least=2))
    factor = max_positions / original
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    scale = _optional(rope, "attention_factor", scale)
    short, long = (_divided(plain, rope, key) for key in ("short_factor", "long_factor"))
    if max_model_len <= original:
        return RopeFrequencies(short, scale)
    return RopeFrequencies(short, scale, original, long)


def _divided(plain: tuple[float, ...], rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Frequencies by a list of factors, one for each."""
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise CheckpointError(f"rope parameter {key!r} is no list of {len(plain)} numbers")
    by = [_number({key: value}, key) for value in factors]
    return tuple(f / value for f, value in zip(plain, by, strict=True))


def cos_sin(table: RopeTable) -> npt.NDArray[np.float32]:
    """[rows, rotary_dim] f32: cos, then sin; see RopeTable."""
    parts = [(table.max_positions, table.inv_freq)]
    if table.boundary is not None:
        parts = [(table.boundary, table.inv_freq), (table.max_positions, table.long_inv_freq)]
    tables = [np.outer(np.arange(count, dtype=np.float64), np.array(freq)) for count, freq in parts]
    angles = np.concatenate(tables)
    values = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * table.scale
    return values.astype(np.float32)
