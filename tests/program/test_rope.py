"""Rotary tables against float64 mathematics, and against `transformers`' own."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.program.ir import RopeTable
from octavo.program.rope import cos_sin, inverse_frequencies

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
