"""Rotary tables against float64 mathematics, and against `transformers`' own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo.errors import CheckpointError
from octavo.program.ir import RopeTable
from octavo.program.rope import RopeFrequencies, cos_sin, inverse_frequencies, rope_frequencies

HALF_ULP = 2.0**-25  # of a float32 in [0.5, 1]: what rounding a cosine once may cost


def test_values_are_float64_rounded_once() -> None:
    inv_freq = inverse_frequencies(64, 1e5)
    table = cos_sin(RopeTable(0, 8192, inv_freq))
    assert table.shape == (8192, 64)
    assert table.dtype == np.float32
    for position in (0, 1, 17, 4095, 8191):
        for i in (0, 1, 13, 31):
            angle = position * 1e5 ** (-2 * i / 64)
            assert table[position, i] == np.float32(math.cos(angle))
            assert table[position, 32 + i] == np.float32(math.sin(angle))


def test_scale_multiplies_both() -> None:
    inv_freq = inverse_frequencies(8, 1e4)
    plain, scaled = (cos_sin(RopeTable(0, 10, inv_freq, scale)) for scale in (1.0, 1.25))
    np.testing.assert_allclose(scaled, 1.25 * plain, rtol=2**-23)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e5), (16, 1e4), (128, 5e5)])
def test_it_agrees_with_transformers(head_dim: int, theta: float) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = 8192
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(positions)[None])
    ours = cos_sin(RopeTable(0, positions, inverse_frequencies(head_dim, theta)))
    # theirs: the exponent, the power, the frequency and the angle each round to float32, the exponent's
    # error grows by log(theta); an angle off by e moves cos and sin by at most e.
    half = head_dim // 2
    angles = np.outer(np.arange(positions), inverse_frequencies(head_dim, theta))
    tolerance = angles * (3 + math.log(theta)) * 2.0**-24 + 4 * HALF_ULP
    for theirs, mine in ((cos, ours[:, :half]), (sin, ours[:, half:])):
        assert (np.abs(theirs[0, :, :half].numpy() - mine) <= tolerance).all()


REQUIRED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {},
    "longrope": {
        "original_max_position_embeddings": 512, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    },
}  # fmt: skip
OPTIONAL: dict[str, dict[str, Any]] = {
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "attention_factor": 1.0,
    },
    "longrope": {"attention_factor": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", REQUIRED)
def test_parameters_that_are_missing_or_make_no_sense_are_named(kind: str) -> None:
    required = {"rope_theta": 10000.0, **REQUIRED[kind]}
    optional = OPTIONAL.get(kind, {})

    def frequencies(**differences: Any) -> RopeFrequencies:
        return rope_frequencies(16, {"rope_type": kind, **required, **optional, **differences}, 512, 256)

    frequencies(**dict.fromkeys(optional))
    for key in (*required, *optional):
        for value in (0, -1.0, math.nan, math.inf, 10**400, "2", [1.0], True, {}):
            with pytest.raises(CheckpointError, match=f"rope parameter '{key}' is "):
                frequencies(**{key: value})
    for key in required:
        with pytest.raises(CheckpointError, match=f"rope parameter '{key}' is "):
            frequencies(**{key: None})


def test_longrope_has_a_factor_for_each_pair() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **REQUIRED["longrope"]}
    for factors in ([1.0] * 7, [1.0] * 7 + [0.0], [1.0] * 7 + ["x"]):
        with pytest.raises(CheckpointError, match="'short_factor' is"):
            rope_frequencies(16, {**rope, "short_factor": factors}, 512, 256)


def test_llama3_blends_between_two_factors() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, **REQUIRED["llama3"], "low_freq_factor": 4.0}
    with pytest.raises(CheckpointError, match=r"'low_freq_factor' is 4\.0, not less than"):
        rope_frequencies(16, rope, 512, 256)
