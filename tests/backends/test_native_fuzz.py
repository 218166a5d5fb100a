"""Programs, limits and inputs of any shape: served as the torch backend serves them, declined when sealed,
or refused by the library with the op and the row; and nothing is touched out of bounds, ever.

Under the sanitizer (test_sanitized.py) fences.py makes that exact to the byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from fences import SANITIZED, FencedRig
from harness import NATIVE_ISAS, Seq, assert_same_bits, inv_freq
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from octavo.backends.base import Backend
from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.errors import BackendError, ProgramError
from octavo.program.builder import ACTIVATIONS, ProgramBuilder
from octavo.program.ir import Buf, DType
from octavo.program.planner import Limits
from octavo.quantization.formats import GROUP, Format

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

EXPERTS = 5
INT32 = np.iinfo(np.int32)
NUM_BLOCKS = 40
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))


@dataclass(frozen=True)
class Shape:
    """A model of one or two layers, and the largest step of it."""

    vocab: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    windows: tuple[int | None, ...]  # of each layer
    qkv_format: Format
    format: Format  # of the other matrices
    head_format: Format
    bias: bool
    kv_dtype: DType
    activation_bits: int
    limits: Limits
    extras: frozenset[str]  # ops and attributes that most models do without
    activation: str

    def build(self, b: ProgramBuilder) -> Buf:
        """Emit the program."""
        embed = b.weight("embed", (self.vocab, self.hidden))
        residual = b.embedding(embed, scale=3.5 if "embedding scale" in self.extras else 1.0)
        h = b.rms_norm(residual, b.weight("norm", (self.hidden,)), eps=1e-5)
        rope = b.rope_table(inv_freq(self.rotary_dim), self.limits.max_model_len)
        for i, window in enumerate(self.windows):
            attended = self._attention(b, i, h, rope, window)
            x = b.linear(attended, b.weight(f"{i}.o", (self.hidden, self.q_heads * self.head_dim)))
            h, residual = self._add_norm(b, f"{i}.ffn_norm", x, residual)
            h, residual = self._add_norm(b, f"{i}.end_norm", self._ffn(b, i, h), residual)
        if "add" in self.extras:
            h = b.add(h, residual, x_scale=0.5)
        logits = b.linear(b.gather_sampled(h), embed)
        if "logits" in self.extras:
            logits = b.scale_logits(logits, scale=0.25, softcap=3.0)
        return logits

    def formats(self) -> dict[str, Format]:
        """By weight."""
        formats = {"embed": self.head_format}
        for i in range(len(self.windows)):
            formats |= {f"{i}.qkv": self.qkv_format}
            formats |= {f"{i}.{name}": self.format for name in ("o", "gate_up", "down")}
        return formats

    def _attention(self, b: ProgramBuilder, i: int, h: Buf, rope: Any, window: int | None) -> Buf:
        width = (self.q_heads + 2 * self.kv_heads) * self.head_dim
        bias = b.weight(f"{i}.qkv.bias", (width,)) if self.bias else None
        qkv = b.linear(h, b.weight(f"{i}.qkv", (width, self.hidden)), bias=bias)
        if "qk norm" in self.extras:
            norms = [b.weight(f"{i}.{name}_norm", (self.head_dim,)) for name in "qk"]
            qkv = b.qk_norm(qkv, *norms, q_heads=self.q_heads, kv_heads=self.kv_heads, eps=1e-6)
        kv = b.kv(self.kv_heads, self.head_dim, window=window)
        q = b.rotary_store_kv(qkv, kv, rope, q_heads=self.q_heads)
        return b.attention(
            q,
            kv,
            q_heads=self.q_heads,
            scale=self.head_dim**-0.5,
            softcap=5.0 if "softcap" in self.extras else None,
            sinks=b.weight(f"{i}.sinks", (self.q_heads,)) if "sinks" in self.extras else None,
        )

    def _add_norm(self, b: ProgramBuilder, name: str, x: Buf, residual: Buf) -> tuple[Buf, Buf]:
        x_scale = 0.7 if "x scale" in self.extras else None
        return b.add_rms_norm(x, residual, b.weight(name, (self.hidden,)), eps=1e-5, x_scale=x_scale)

    def _ffn(self, b: ProgramBuilder, i: int, h: Buf) -> Buf:
        if "experts" in self.extras:
            router = b.weight(f"{i}.router", (EXPERTS, self.hidden))
            gate_up = b.weight(f"{i}.gate_up", (EXPERTS * 2 * self.ffn, self.hidden))
            down = b.weight(f"{i}.down", (EXPERTS * self.hidden, self.ffn))
            return b.moe(h, router, gate_up, down, top_k=2, normalize=True, activation=self.activation)
        gate_up = b.linear(h, b.weight(f"{i}.gate_up", (2 * self.ffn, self.hidden)))
        return b.linear(
            b.gated_activation(gate_up, self.activation), b.weight(f"{i}.down", (self.hidden, self.ffn))
        )


def sizes(multiple: int, most: int) -> st.SearchStrategy[int]:
    """Multiples up to `most`."""
    return st.integers(1, most // multiple).map(lambda n: n * multiple)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Mostly shapes that kernels take, and enough that none does."""
    multiple = draw(st.sampled_from([GROUP, GROUP, 8, 8, 1]))
    formats = list(Format) if multiple % GROUP == 0 else [f for f in Format if not f.quantized]
    head_dim = draw(sizes(8, 48) if multiple > 1 else st.integers(2, 48))
    kv_heads = draw(st.integers(1, 3))
    q_heads = kv_heads * draw(st.integers(1, 4))
    if multiple == GROUP:  # what o reads is as wide as its groups want
        head_dim = draw(st.sampled_from([8, 16, 32]))
        q_heads = kv_heads * (GROUP // head_dim) * draw(st.integers(1, 2))
    rare = st.sampled_from(
        ["embedding scale", "x scale", "qk norm", "softcap", "sinks", "add", "logits", "experts"]
    )
    odd = draw(st.integers(0, 4)) == 0
    max_tokens = draw(st.integers(1, 40))
    return Shape(
        vocab=draw(st.integers(1, 70)),
        hidden=draw(sizes(multiple, 160)),
        ffn=draw(sizes(multiple, 160)),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)),
        windows=tuple(draw(st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=2))),
        qkv_format=draw(st.sampled_from(formats)),
        format=draw(st.sampled_from(formats)),
        head_format=draw(st.sampled_from(formats)),
        bias=draw(st.booleans()),
        kv_dtype=draw(st.sampled_from(list(DType))),
        activation_bits=draw(st.sampled_from([8, 16])),
        limits=Limits(max_tokens, draw(st.integers(1, 5)), max_tokens, draw(st.integers(1, 100))),
        extras=frozenset(draw(st.sets(rare, min_size=1, max_size=2))) if odd else frozenset(),
        activation=draw(st.sampled_from(ACTIVATIONS)) if odd else "silu",
    )


def rig_of(shape: Shape, backend: Backend) -> FencedRig:
    """The program, bound."""
    return FencedRig(
        backend,
        shape.build,
        formats=shape.formats(),
        kv_dtype=shape.kv_dtype,
        activation_bits=shape.activation_bits,
        limits=shape.limits,
        num_blocks=NUM_BLOCKS,
    )


def native_or_reason(shape: Shape, threads: int, isa: str) -> FencedRig | str:
    """The rig, or why the program was declined."""
    backend = NativeBackend(threads, isa)
    try:
        return rig_of(shape, backend)
    except ProgramError as why:
        backend.close()
        return str(why)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """Hypothesis' settings for programs that take a while to build."""
    return settings(
        max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )


def random_batch(rng: np.random.Generator, shape: Shape, seqs: list[Seq]) -> list[tuple[Seq, int]]:
    """New tokens for some of the sequences; for some of them none."""
    batch, room = [], shape.limits.max_tokens
    for index in rng.permutation(len(seqs)):
        seq = seqs[index]
        most = min(room, len(seq.token_ids) - seq.num_computed)
        n = int(rng.choice([0, min(1, most), rng.integers(0, most + 1), most]))
        batch.append((seq, n))
        room -= n
    return batch


def new_seqs(shape: Shape, seed: int) -> list[Seq]:
    """As many sequences as fit, of random tokens."""
    rng = np.random.default_rng(seed)
    count = min(shape.limits.max_seqs, NUM_BLOCKS // (len(shape.windows) * shape.limits.max_blocks + 1))
    length = shape.limits.max_model_len
    return [Seq([int(i) for i in rng.integers(0, shape.vocab, length)]) for _ in range(count)]


@fuzz(EXAMPLES)
@given(
    shape=shapes(),
    threads=st.integers(1, 3),
    isa=st.sampled_from(NATIVE_ISAS),
    seed=st.integers(0, 99),
)
def test_any_program_is_served_as_torch_serves_it_or_declined(
    shape: Shape, threads: int, isa: str, seed: int
) -> None:
    native = native_or_reason(shape, threads, isa)
    if isinstance(native, str):
        event("declined")
        assert re.search(r"does not serve 'test':\n  - \w+: .*\w.* \(\d+ ops\)", native), native
        return
    event("served")
    rigs = [native, rig_of(shape, NativeBackend(1, "scalar"))]
    if "experts" not in shape.extras:  # a rounding may choose another expert
        rigs.append(rig_of(shape, TorchBackend(quantized=True)))
    # Both quantise activations; where they round apart, one integer moves by one: of 127, or of 4095 (q8).
    tolerance = 0.05 if shape.activation_bits == 8 else 4e-3
    seqs = [new_seqs(shape, seed) for _ in rigs]
    rng = np.random.default_rng(seed)
    try:
        for _ in range(4):
            batch = random_batch(rng, shape, seqs[0])
            if not sum(n for _, n in batch):
                continue  # torch takes no empty steps
            numbers = [next(i for i, s in enumerate(seqs[0]) if s is seq) for seq, _ in batch]
            found, portable, *by_torch = (
                rig.run([(own[i], n) for i, (_, n) in zip(numbers, batch, strict=True)])
                for rig, own in zip(rigs, seqs, strict=True)
            )
            assert_same_bits(found, portable, f"{isa}, {threads} threads")
            for expected in by_torch:
                scale = max(np.abs(expected).max(), 0.1)  # the terms of a single logit may nearly cancel
                np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)
    finally:
        for rig in rigs:
            rig.close()


ARRAYS = [
    "token_ids", "positions", "rope_rows", "cu_q", "seq_lens", "slot_mapping", "block_table", "sampled_rows",
]  # fmt: skip
VALUES = st.integers(-3, 3) | st.integers(-40, 2000) | st.integers(INT32.min, INT32.max)


@fuzz(EXAMPLES)
@given(
    shape=shapes(),
    spoiled=st.lists(st.tuples(st.sampled_from(ARRAYS), st.integers(0, 2**20), VALUES), max_size=3),
    counts=st.none() | st.tuples(VALUES, VALUES, VALUES),
    seed=st.integers(0, 99),
)
def test_any_input_is_refused_by_op_and_row_or_stays_in_bounds(
    shape: Shape, spoiled: list[tuple[str, int, int]], counts: tuple[int, int, int] | None, seed: int
) -> None:
    rig = native_or_reason(replace(shape, extras=frozenset(), activation="silu"), 2, "auto")
    if isinstance(rig, str):
        return
    seqs = new_seqs(shape, seed)
    filled = rig.fill(random_batch(np.random.default_rng(seed), shape, seqs), "all")
    for name, index, value in spoiled:
        array = getattr(rig.inputs, name).reshape(-1)
        array[index % array.size] = value
    before = None if SANITIZED else rig.memory.arena.clone()
    refusal = None
    try:
        rig.backend.run(*(counts or filled))
    except BackendError as why:
        refusal = str(why)
    finally:
        rig.check()
        rig.close()
    event("refused" if refusal else "served")
    if refusal:
        where = r"(op \d+ \(\w+\), row \d+, |row \d+, |the step has |cu_q goes )"
        assert re.match(f"native backend: {where}", refusal), refusal
        assert before is None or bool((rig.memory.arena == before).all())
