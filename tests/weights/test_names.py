"""Names and row orders against the gguf package's map and llama.cpp's permutation."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gguf_converter import ARCHITECTURES
from octavo.weights.names import deinterleaved_rows, gguf_name

MODULES = [
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.qkv_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.o_proj",
    "self_attn.sinks",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "mlp.gate",
    "mlp.router",
    "block_sparse_moe.gate",
]


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("module", MODULES)
def test_names_are_those_of_the_gguf_package(module: str, kind: str) -> None:
    """In every family that has such a tensor."""
    found = 0
    for family, arch in ARCHITECTURES.items():
        theirs = gguf.get_tensor_name_map(arch, 13)
        for layer in (0, 7, 12):
            name = f"model.layers.{layer}.{module}.{kind}"
            expected = theirs.get_name(name, try_suffixes=(f".{kind}",))
            assert expected in (None, gguf_name(name, family))
            found += expected is not None
    assert found


def test_names_beside_the_layers() -> None:
    for family, arch in ARCHITECTURES.items():
        theirs = gguf.get_tensor_name_map(arch, 1)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            expected = theirs.get_name(name, try_suffixes=(".weight",))
            assert expected == gguf_name(name, family) or (name.startswith("lm_head") and expected is None)


@pytest.mark.parametrize(
    ("family", "stem", "parts", "merged"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), "layers.3.feed_forward.experts.{}.weight"),
        (
            "qwen3_moe",
            "mlp",
            ("gate_proj", "up_proj", "down_proj"),
            "model.layers.3.mlp.experts.{}.weight",
        ),
    ],
)
def test_experts_are_matrices_of_a_stack(family: str, stem: str, parts: tuple[str, ...], merged: str) -> None:
    """The stack has the name that the converter merges the experts under."""
    theirs = gguf.get_tensor_name_map(ARCHITECTURES[family], 4)
    for part in parts:
        stack = theirs.get_name(merged.format(part), try_suffixes=(".weight",))
        assert gguf_name(f"model.layers.3.{stem}.experts.12.{part}.weight", family) == f"{stack}[12]"


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.q_proj",
        "model.layers.x.mlp.up_proj.weight",
        "model.layers.0.mlp.experts.1.w4.weight",
        "model.layers.0.mlp.experts.x.w1.weight",
        "model.layers.0",
        "blk.0.attn_q.weight",
        "model.layers.0.mlp.up_proj.weight.extra",
        "weight",
        "",
    ],
)
def test_unknown_names_are_key_errors(name: str) -> None:
    with pytest.raises(KeyError):
        gguf_name(name, "llama")


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
