"""Llama against `transformers`, on tiny random models of every shape of head.

The oracle runs in float64, so what differs is our float32. Its tolerance: a reduction of K terms in
float32 is off by at most (K + 2) u of its magnitude, u = 2**-24 (Higham, "Accuracy and Stability of
Numerical Algorithms", section 3.1). A layer has eight on the path to the logits (two norms, qkv, scores,
values, o, gate_up, down), the head two more. Norms keep activations at unit scale, so errors are handed
on as they are and, to first order, add up. `transformers` has its rotary angles in float32 even so: at
position p they are off by up to p (3 + log theta) u. All of it is relative to the largest logit. A wrong
head, row or position is off by whole units, four orders above.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo.config.resolve import resolve
from octavo.errors import UnsupportedModelError
from octavo.models import llama
from octavo.models.registry import model_builder
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Attention, DType, Embedding, Linear, Program, Shard
from octavo.quantization.formats import Format
from octavo.runner.model_runner import ModelRunner
from tiny_models import NUM_TOKENS, TinyModel, make_llama_gguf

U = 2.0**-24


def tolerance(tiny: TinyModel, logits: npt.NDArray[np.float64]) -> float:
    config, length = tiny.model.config, logits.shape[1]
    longest = max(config.intermediate_size, config.num_attention_heads * config.head_dim, length)
    reductions = 8 * config.num_hidden_layers + 2
    rope = length * (3 + math.log(config.rope_parameters["rope_theta"]))
    return float((reductions * (longest + 2) + rope) * U * np.abs(logits).max())


def predict(path: Path, ids: list[list[int]], **settings: Any) -> npt.NDArray[np.float32]:
    runner = ModelRunner(
        path, resolve({"backend": "torch", "threads": 1, "activation_bits": "16"} | settings).config
    )
    try:
        return runner.predict(ids)
    finally:
        runner.close()


def random_ids(length: int, batch: int = 1) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(length).integers(0, NUM_TOKENS, (batch, length)).tolist()
    return ids


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "num_hidden_layers": 3},
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
        {"hidden_size": 40, "head_dim": 8, "intermediate_size": 72, "num_hidden_layers": 1},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-3},
        {"vocab_size": NUM_TOKENS + 42},
    ],
    ids=["gqa", "tied", "mqa", "mha", "wide heads", "narrow", "theta", "padded vocabulary"],
)
def test_logits_are_those_of_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    tiny = make_llama_gguf(tmp_path, **overrides)
    ids = random_ids(70, batch=2)
    expected = tiny.logits(ids)
    found = predict(tiny.path, ids)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance(tiny, expected)
    assert expected.std() > 0.5, "a model whose logits are all alike tests nothing"


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [False, True])
def test_quantised_weights_are_dequantised_exactly(tmp_path: Path, quantization: str, tied: bool) -> None:
    tiny = make_llama_gguf(tmp_path, quantization=quantization, tie_word_embeddings=tied)
    ids = random_ids(40)
    expected = tiny.logits(ids)
    assert np.abs(predict(tiny.path, ids) - expected).max() < tolerance(tiny, expected)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A model whose sequences span more than one KV split."""
    return make_llama_gguf(tmp_path_factory.mktemp("llama"), max_position_embeddings=800)


def test_beyond_a_split(long_model: TinyModel) -> None:
    ids = random_ids(600)
    expected = long_model.logits(ids)
    found = predict(long_model.path, ids, max_num_seqs=512)
    assert np.abs(found - expected).max() < tolerance(long_model, expected)


@pytest.mark.parametrize("kv_dtype", ["f32", "f16"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_do_not_change_a_bit(long_model: TinyModel, chunk: int, kv_dtype: str) -> None:
    ids = random_ids(100)
    whole = predict(long_model.path, ids, kv_dtype=kv_dtype, max_num_seqs=512)
    chunks = {"max_num_batched_tokens": chunk, "max_num_seqs": chunk}
    assert np.array_equal(predict(long_model.path, ids, kv_dtype=kv_dtype, **chunks), whole)


def test_chunks_do_not_change_a_bit_across_splits(long_model: TinyModel) -> None:
    ids = random_ids(600)
    whole = predict(long_model.path, ids, max_num_batched_tokens=600, max_num_seqs=600)
    assert np.array_equal(predict(long_model.path, ids, max_num_batched_tokens=90, max_num_seqs=90), whole)


# -- the program ----------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "rms_norm_eps": 1e-5,
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 128,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


def build(**overrides: Any) -> Program:
    b = ProgramBuilder("llama", format_of=lambda parts: Format.F32, kv_dtype=DType.F32)
    return llama.build(b, CONFIG | overrides, 128)


def test_the_listing_of_a_layer() -> None:
    layer = ["linear", "rotary_store_kv", "attention", "linear", "add_rms_norm", "linear", "gated_activation"]
    assert [op.kind for op in build().ops] == [
        "embedding", "rms_norm", *layer, "linear", "add_rms_norm", *layer, "linear", "add_rms_norm",
        "gather_rows", "linear",
    ]  # fmt: skip


def test_weights_are_stacked_and_split() -> None:
    weights = {weight.name: weight for weight in build().weights}
    qkv = weights["model.layers.1.self_attn.qkv.weight"]
    assert qkv.shape == (128, 64)
    assert qkv.parts == tuple(f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv")
    gate_up = weights["model.layers.1.mlp.gate_up"]
    assert gate_up.shape == (192, 64)
    assert gate_up.parts == ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    shards = {name.split(".")[-2 if name.endswith("weight") else -1]: w.shard for name, w in weights.items()}
    assert shards == {
        "embed_tokens": Shard.ROWS, "lm_head": Shard.ROWS, "qkv": Shard.ROWS, "gate_up": Shard.ROWS,
        "o_proj": Shard.COLUMNS, "down_proj": Shard.COLUMNS, "norm": Shard.REPLICATED,
        "input_layernorm": Shard.REPLICATED, "post_attention_layernorm": Shard.REPLICATED,
    }  # fmt: skip


def test_a_tied_head_is_the_embedding() -> None:
    program = build(tie_word_embeddings=True)
    embedding, head = program.ops[0], program.ops[-1]
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Linear)
    assert head.weight is embedding.weight
    assert "lm_head.weight" not in {weight.name for weight in program.weights}


def test_every_layer_keeps_its_own_kv() -> None:
    program = build()
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    assert [op.kv.layer for op in attentions] == [0, 1]
    assert {op.scale for op in attentions} == {0.25}
    assert program.ropes[0].max_positions == 128


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_parameters": {"rope_type": "warp", "rope_theta": 1e4}}, r"rope type 'warp' is not served"),
        ({"hidden_act": "relu2"}, r"activation 'relu2' is not served"),
        ({"mlp_bias": True}, r"mlp_bias"),
        ({"rotary_dim": 8}, r"rotation of 8 elements of heads of 16 is not served"),
        ({"rotary_dim": 15, "head_dim": 15}, r"rotation of 15 elements of heads of 15 is not served"),
    ],
)
def test_what_is_not_served_is_named(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        build(**overrides)


def test_architectures() -> None:
    assert model_builder("llama") is llama.build
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'rwkv7' is not served; served so far: .*llama"
    ):
        model_builder("rwkv7")
