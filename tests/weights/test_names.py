"""Names and row orders against the gguf package's map and llama.cpp's permutation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.weights.names import deinterleaved_rows, gguf_name

LAYER_NAMES = [
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]


def test_names_are_those_of_the_gguf_package() -> None:
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 13)
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [f"model.layers.{layer}.{name}" for layer in (0, 7, 12) for name in LAYER_NAMES]
    for name in names:
        assert gguf_name(name) == theirs.get_name(name, try_suffixes=(".weight",))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.0",
        "blk.0.attn_q.weight",
        "model.layers.0.mlp.up_proj.weight.extra",
        "",
    ],
)
def test_unknown_names_are_key_errors(name: str) -> None:
    with pytest.raises(KeyError):
        gguf_name(name)


@given(st.integers(1, 9), st.sampled_from([2, 4, 16, 64, 6]))
def test_deinterleaving_undoes_llama_cpps_permutation(num_heads: int, head_dim: int) -> None:
    """convert_hf_to_gguf.py: a head's halves [2, D/2] become pairs [D/2, 2]. Written out in loops."""
    rows = num_heads * head_dim
    original = np.arange(rows)
    interleaved = np.empty_like(original)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                interleaved[head * head_dim + 2 * i + half] = original[
                    head * head_dim + half * (head_dim // 2) + i
                ]
    order = deinterleaved_rows(num_heads, head_dim)
    assert order.dtype == np.int32
    assert np.array_equal(interleaved[order], original)
    assert sorted(order.tolist()) == list(range(rows))
