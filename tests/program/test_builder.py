"""What can't be a program is refused while it is built, with the values that don't fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.errors import ProgramError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Attention, Dim, DType, Linear, RotaryStoreKV
from octavo.program.rope import inverse_frequencies
from octavo.quantization.formats import Format


class Parts:
    """A builder with a handle of every kind: 4 query heads of 16 over 2 KV heads, 64 wide."""

    def __init__(self, format_: Format = Format.F32) -> None:
        self.b = ProgramBuilder("test", format_of=lambda parts: format_, kv_dtype=DType.F16)
        self.embed = self.b.weight("embed", (96, 64))
        self.norm = self.b.weight("norm", (64,))
        self.qkv = self.b.weight("qkv", (128, 64), parts=("q", "k", "v"))
        self.rope = self.b.rope_table(inverse_frequencies(16, 1e4), 32)
        self.kv = self.b.kv(2, 16)
        self.x = self.b.embedding(self.embed)


BAD: dict[str, tuple[Callable[[Parts], Any], str]] = {
    "embedding of a vector": (lambda p: p.b.embedding(p.norm), r"embedding takes a weight of 2 dimensions"),
    "embedding of a buffer": (lambda p: p.b.embedding(p.x), r"embedding was given Buf.* takes a weight"),
    "rms_norm of a matrix": (lambda p: p.b.rms_norm(p.x, p.embed, eps=1e-5), r"@embed is \(96, 64\)"),
    "rms_norm of another width": (
        lambda p: p.b.rms_norm(p.b.linear(p.x, p.qkv), p.norm, eps=1e-5),
        r"%1 has 128 columns, but @norm wants 64",
    ),
    "rms_norm of a number": (lambda p: p.b.rms_norm(1.0, p.norm, eps=1e-5), r"@norm was given 1\.0; ops"),
    "add_rms_norm of a number": (
        lambda p: p.b.add_rms_norm(p.x, 0, p.norm, eps=1e-5),
        r"@norm was given 0; ops take handles of activations",
    ),
    "add_rms_norm of other rows": (
        lambda p: p.b.add_rms_norm(p.b.gather_sampled(p.x), p.x, p.norm, eps=1e-5),
        r"add_rms_norm adds %1 .*R.* to %0 .*T",
    ),
    "linear of another width": (
        lambda p: p.b.linear(p.b.linear(p.x, p.qkv), p.qkv),
        r"%1 has 128 columns, but @qkv wants 64",
    ),
    "linear of a vector": (lambda p: p.b.linear(p.x, p.norm), r"linear takes a weight of 2 dim.*@norm"),
    "linear of two buffers": (lambda p: p.b.linear(p.x, p.x), r"linear was given Buf.* it takes a weight"),
    "linear with a bias too short": (
        lambda p: p.b.linear(p.x, p.qkv, bias=p.norm),
        r"bias @norm \(64,\) does not fit @qkv \(128, 64\)",
    ),
    "linear with a matrix as bias": (
        lambda p: p.b.linear(p.x, p.qkv, bias=p.embed),
        r"the bias of linear takes a weight of 1 dimensions",
    ),
    "rotary_store_kv of another width": (
        lambda p: p.b.rotary_store_kv(p.x, p.kv, p.rope, q_heads=4),
        r"wants 128 = \(4 \+ 2 \* 2\) \* 16 columns, but %0 has 64",
    ),
    "rotary_store_kv of sampled rows": (
        lambda p: p.b.rotary_store_kv(p.b.linear(p.b.gather_sampled(p.x), p.qkv), p.kv, p.rope, q_heads=4),
        r"rotary_store_kv takes a row for each token, but %2 has rows R",
    ),
    "a rotation wider than a head": (
        lambda p: p.b.rotary_store_kv(
            p.b.linear(p.x, p.qkv), p.b.kv(2, 16), p.b.rope_table((1.0,) * 9, 32), q_heads=4
        ),
        r"\$rope1 rotates 18 elements of heads of 16",
    ),
    "attention of another width": (
        lambda p: p.b.attention(p.x, p.kv, q_heads=8, scale=0.25),
        r"%0 has 64 columns, but kv0 wants 128",
    ),
    "attention with uneven heads": (
        lambda p: p.b.attention(p.b.embedding(p.b.weight("w", (8, 48))), p.kv, q_heads=3, scale=0.25),
        r"3 query heads cannot share 2 KV heads evenly",
    ),
    "an unknown activation": (
        lambda p: p.b.gated_activation(p.x, "swish"),
        r"activation 'swish' is unknown; known: silu",
    ),
    "an odd width to halve": (
        lambda p: p.b.gated_activation(p.b.embedding(p.b.weight("w", (8, 3))), "silu"),
        r"gated_activation halves %1, which has 3 columns",
    ),
    "gathering twice": (
        lambda p: p.b.gather_sampled(p.b.gather_sampled(p.x)),
        r"gather_sampled takes a row for each token, but %1 has rows R",
    ),
    "a weight declared twice": (lambda p: p.b.weight("norm", (64,)), r"'norm' is declared twice"),
    "KV without heads": (lambda p: p.b.kv(0, 16), r"layer 1 can't keep KV of 0 heads of 16 elements"),
    "a window of nothing": (lambda p: p.b.kv(2, 16, window=0), r"layer 1 can't .* 16 elements, window 0"),
    "logits of all tokens": (lambda p: p.b.build(p.x), r"logits %0 have rows T; gather the sampled rows"),
    "logits that are no handle": (lambda p: p.b.build(None), r"build was given None"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    act, message = BAD[name]
    with pytest.raises(ProgramError, match=message):
        act(Parts())


def test_a_program_needs_a_kv_cache() -> None:
    b = ProgramBuilder("no-kv", format_of=lambda parts: Format.F32, kv_dtype=DType.F32)
    with pytest.raises(ProgramError, match=r"program 'no-kv' keeps no KV cache"):
        b.build(b.gather_sampled(b.embedding(b.weight("w", (8, 8)))))


def test_quantised_rows_hold_whole_groups() -> None:
    b = ProgramBuilder("test", format_of=lambda parts: Format.Q4M, kv_dtype=DType.F32)
    with pytest.raises(ProgramError, match=r"'w' is q4m with rows of 48: not a multiple of its group, 32"):
        b.weight("w", (8, 48))
    assert b.weight("norm", (48,)).format is Format.F32, "vectors are never quantised"


def test_formats_are_asked_for_the_parts() -> None:
    asked: list[tuple[str, ...]] = []

    def format_of(parts: tuple[str, ...]) -> Format:
        asked.append(parts)
        return Format.Q8

    b = ProgramBuilder("test", format_of=format_of, kv_dtype=DType.F32)
    assert b.weight("alone", (4, 32)).parts == ("alone",)
    assert b.weight("stack", (8, 32), parts=("a", "b")).format is Format.Q8
    assert asked == [("alone",), ("a", "b")]


def test_shapes_of_outputs() -> None:
    p = Parts()
    qkv = p.b.linear(p.x, p.qkv)
    q = p.b.rotary_store_kv(qkv, p.kv, p.rope, q_heads=4)
    out = p.b.attention(q, p.kv, q_heads=4, scale=0.25)
    gated = p.b.gated_activation(qkv, "silu")
    logits = p.b.linear(p.b.gather_sampled(out), p.embed)
    assert [b.shape for b in (qkv, q, out, gated, logits)] == [
        (Dim.TOKENS, 128),
        (Dim.TOKENS, 64),
        (Dim.TOKENS, 64),
        (Dim.TOKENS, 64),
        (Dim.SAMPLED, 96),
    ]
    program = p.b.build(logits)
    assert program.vocab_size == 96
    assert [op.kind for op in program.ops] == [
        "embedding", "linear", "rotary_store_kv", "attention", "gated_activation", "gather_rows", "linear",
    ]  # fmt: skip


def test_ops_know_what_they_read_and_write() -> None:
    p = Parts()
    qkv = p.b.linear(p.x, p.qkv)
    q = p.b.rotary_store_kv(qkv, p.kv, p.rope, q_heads=4)
    normed, total = p.b.add_rms_norm(q, p.x, p.norm, eps=1e-5)
    p.b.attention(q, p.kv, q_heads=4, scale=0.25)
    program = p.b.build(p.b.linear(p.b.gather_sampled(normed), p.embed))
    _, linear, rotary, norm, attention, *_ = program.ops
    assert isinstance(linear, Linear)
    assert (linear.reads, linear.writes, linear.weights) == ((p.x,), (qkv,), (p.qkv,))
    assert isinstance(rotary, RotaryStoreKV)
    assert (rotary.reads, rotary.writes, rotary.attributes) == ((qkv,), (q,), {"q_heads": 4})
    assert (norm.reads, norm.writes, norm.weights) == ((q, p.x), (normed, total), (p.norm,))
    assert isinstance(attention, Attention)
    assert attention.attributes == {"q_heads": 4, "scale": 0.25}
