"""Prices against counts by hand, and against what everybody knows of a transformer: two FLOPs a
parameter and token."""

from __future__ import annotations

import pytest

from octavo.models import llama
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Attention, Dim, DType, Linear, Program, Weight
from octavo.program.pricing import OpCost, StepShape, price
from octavo.program.rope import inverse_frequencies
from octavo.quantization.formats import Format

#: HuggingFaceTB/SmolLM2-135M's config.json
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rotary_dim": 64,
    "rms_norm_eps": 1e-5,
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
SMOLLM2_PARAMETERS = 134_515_008  # as its model card counts


def elements(weight: Weight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count


def f32_nbytes(weight: Weight) -> int:
    return 4 * elements(weight)


def small() -> Program:
    """3 tokens wide enough to count by hand: 64 wide, 4 heads of 16 over 2 KV heads, f16 KV."""
    b = ProgramBuilder("small", format_of=lambda parts: Format.F32, kv_dtype=DType.F16)
    embed, kv = b.weight("embed", (96, 64)), b.kv(2, 16)
    rope = b.rope_table(inverse_frequencies(16, 1e4), 100)
    qkv = b.linear(b.embedding(embed), b.weight("qkv", (128, 64)), bias=b.weight("bias", (128,)))
    q = b.rotary_store_kv(qkv, kv, rope, q_heads=4)
    attended = b.attention(q, kv, q_heads=4, scale=0.25)
    return b.build(b.linear(b.gather_sampled(attended), embed))


@pytest.fixture
def costs() -> dict[str, OpCost]:
    """Of a step with one new token at position 9 and a prompt of two: contexts 10, 1 and 2."""
    shape = StepShape(num_tokens=3, num_seqs=2, num_sampled=2, query_context=13, kv_tokens=12)
    assert [shape.of(dim) for dim in Dim] == [3, 2, 2]
    embedding, qkv, rotary, attention, gather, head = price(small(), shape, f32_nbytes)
    return {
        "embedding": embedding, "qkv": qkv, "rotary": rotary, "attention": attention, "gather": gather,
        "head": head,
    }  # fmt: skip


def test_linear(costs: dict[str, OpCost]) -> None:
    cost = costs["qkv"]
    assert cost.flops == 2 * 3 * 128 * 64
    assert cost.weight_nbytes == 4 * (128 * 64 + 128)
    assert cost.activation_nbytes == 4 * 3 * (64 + 128)
    assert cost.kv_nbytes == 0


def test_only_sampled_rows_meet_the_head(costs: dict[str, OpCost]) -> None:
    assert costs["head"].flops == 2 * 2 * 96 * 64
    assert costs["head"].activation_nbytes == 4 * 2 * (64 + 96)
    assert costs["head"].weight_nbytes == 4 * 96 * 64


def test_embedding_reads_its_rows_only(costs: dict[str, OpCost]) -> None:
    assert costs["embedding"].weight_nbytes == 4 * 3 * 64


def test_attention(costs: dict[str, OpCost]) -> None:
    cost = costs["attention"]
    # For each pair of query and key, each of 4 heads: a product of 16 for the score, 16 for the value.
    assert cost.flops == 13 * 4 * (2 * 16 + 2 * 16)
    assert cost.kv_nbytes == 12 * 2 * (2 * 16) * 2  # K and V of 2 heads of 16 in f16
    assert cost.weight_nbytes == 0


def test_kv_is_written_once(costs: dict[str, OpCost]) -> None:
    assert costs["rotary"].kv_nbytes == 3 * 2 * (2 * 16) * 2


def test_smollm2_takes_two_flops_a_parameter() -> None:
    b = ProgramBuilder("smollm2", format_of=lambda parts: Format.F32, kv_dtype=DType.F16)
    program = llama.build(b, SMOLLM2, 8192)
    assert sum(elements(weight) for weight in program.weights) == SMOLLM2_PARAMETERS
    shape = StepShape(num_tokens=1, num_seqs=1, num_sampled=1, query_context=1, kv_tokens=1)
    costs = price(program, shape, f32_nbytes)
    linear = sum(cost.flops for cost in costs if isinstance(cost.op, Linear))
    norms = (2 * 30 + 1) * 576  # the only parameters that are not in a matrix product
    assert linear == 2 * (SMOLLM2_PARAMETERS - norms)
    assert sum(cost.flops for cost in costs) == pytest.approx(2 * SMOLLM2_PARAMETERS, rel=0.005)
    kv = sum(cost.kv_nbytes for cost in costs if isinstance(cost.op, Attention))
    assert kv == 30 * 2 * 3 * 64 * 2
