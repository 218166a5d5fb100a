"""Sealed programs: no two things that live at once share a byte, and nothing is left unexplained."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ProgramError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import AddRMSNorm, Buf, Dim, DType, Op, Program, Weight
from octavo.program.planner import ALIGNMENT, Kernel, Limits, SealedProgram, Unserved, seal
from octavo.program.rope import inverse_frequencies
from octavo.quantization.formats import Format

WIDTH = 64
LIMITS = Limits(max_tokens=24, max_seqs=4, max_sampled=4, max_model_len=100)


class Table:
    """A backend on paper. scratch: bytes by op kind; unserved: reasons by op kind."""

    name = "paper"

    def __init__(self, scratch: dict[str, int] | None = None, unserved: dict[str, str] | None = None) -> None:
        self.scratch = scratch or {}
        self.unserved = unserved or {}

    def choose(self, op: Op, limits: Limits) -> Kernel:
        if op.kind in self.unserved:
            raise Unserved(self.unserved[op.kind])
        return Kernel(op.kind, self.scratch.get(op.kind, 0))

    def weight_nbytes(self, weight: Weight) -> int:
        nbytes = 4
        for size in weight.shape:
            nbytes *= size
        return nbytes


def builder(name: str = "test") -> ProgramBuilder:
    return ProgramBuilder(name, format_of=lambda parts: Format.F32, kv_dtype=DType.F16)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Ops in random order on random live buffers: any of them may be read again, much later."""
    b = builder()
    embed, norm = b.weight("embed", (97, WIDTH)), b.weight("norm", (WIDTH,))
    odd = b.weight("odd", (3, WIDTH))  # rows of 12 bytes: what follows must be aligned even so
    widen, narrow = b.weight("widen", (2 * WIDTH, WIDTH)), b.weight("narrow", (WIDTH, 2 * WIDTH))
    rope, kv = b.rope_table(inverse_frequencies(16, 1e4), 100), b.kv(2, 16)
    narrow_bufs, wide_bufs = [b.embedding(embed)], []
    kinds = ["embedding", "rms_norm", "add_rms_norm", "widen", "narrow", "gate", "rotary", "attention"]
    kinds += ["odd"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=24)):
        x = draw(st.sampled_from(narrow_bufs))
        if kind == "embedding":
            narrow_bufs.append(b.embedding(embed))
        elif kind == "rms_norm":
            narrow_bufs.append(b.rms_norm(x, norm, eps=1e-5))
        elif kind == "add_rms_norm":
            narrow_bufs += b.add_rms_norm(x, draw(st.sampled_from(narrow_bufs)), norm, eps=1e-5)
        elif kind == "widen":
            wide_bufs.append(b.linear(x, widen))
        elif kind == "odd":
            b.linear(x, odd)
        elif kind == "attention":
            narrow_bufs.append(b.attention(x, kv, q_heads=4, scale=0.25))
        elif wide_bufs:
            wide = draw(st.sampled_from(wide_bufs))
            if kind == "narrow":
                narrow_bufs.append(b.linear(wide, narrow))
            elif kind == "gate":
                narrow_bufs.append(b.gated_activation(wide, "silu"))
            else:
                narrow_bufs.append(b.rotary_store_kv(wide, kv, rope, q_heads=4))
    last = b.gather_sampled(draw(st.sampled_from(narrow_bufs)))
    return b.build(b.linear(last, embed))


@dataclass
class Region:
    """What lives in the arena during ops [first, last], by the program alone."""

    what: str
    offset: int
    nbytes: int
    first: int
    last: int


def regions(sealed: SealedProgram) -> list[Region]:
    """Slow and plain: a buffer lives from the op that writes it to the last that reads it."""
    program, limits = sealed.program, sealed.limits
    written: dict[Buf, int] = {}
    read: dict[Buf, int] = {program.logits: len(program.ops)}
    for i, planned in enumerate(sealed.ops):
        for buf in planned.op.writes:
            written[buf] = i
        for buf in planned.op.reads:
            read[buf] = max(i, read.get(buf, 0))
    found = [
        Region(
            str(buf),
            sealed.offset(buf),
            limits.of(buf.rows) * buf.width * 4,
            at,
            read.get(buf, at),
        )
        for buf, at in written.items()
    ]
    found += [
        Region(f"scratch {i}", planned.scratch, planned.kernel.scratch_nbytes, i, i)
        for i, planned in enumerate(sealed.ops)
        if planned.kernel.scratch_nbytes
    ]
    return found


def may_share(sealed: SealedProgram, a: Region, b: Region) -> bool:
    """The contract's one exception: out_sum of an add_rms_norm where its residual lay, which dies."""
    for i, planned in enumerate(sealed.ops):
        op = planned.op
        if isinstance(op, AddRMSNorm) and {str(op.residual), str(op.out_sum)} == {a.what, b.what}:
            first, second = (a, b) if a.first < b.first else (b, a)
            return first.last == i == second.first and a.offset == b.offset
    return False


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


SCRATCH = st.dictionaries(st.sampled_from(["linear", "attention", "embedding"]), st.integers(0, 30_000))
LIMITS_DRAWN = st.builds(
    Limits,
    max_tokens=st.integers(1, 40),
    max_seqs=st.integers(1, 8),
    max_sampled=st.integers(1, 8),
    max_model_len=st.just(100),
)


@given(programs(), SCRATCH, LIMITS_DRAWN)
def test_nothing_that_lives_at_once_overlaps(
    program: Program, scratch: dict[str, int], limits: Limits
) -> None:
    sealed = seal(program, limits, Table(scratch))
    live = regions(sealed)
    for i, a in enumerate(live):
        assert a.offset % ALIGNMENT == 0, a
        assert a.offset >= 0
        assert a.offset + a.nbytes <= sealed.arena_nbytes, a
        for b in live[:i]:
            apart_in_time = a.last < b.first or b.last < a.first
            apart_in_space = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart_in_time or apart_in_space or may_share(sealed, a, b), (a, b)


@given(programs(), SCRATCH)
def test_the_arena_is_between_what_must_live_and_the_sum(program: Program, scratch: dict[str, int]) -> None:
    sealed = seal(program, LIMITS, Table(scratch))
    live = regions(sealed)
    assert sealed.arena_nbytes <= sum(align(r.nbytes) for r in live)
    for i in range(len(program.ops)):
        at_once = {(r.offset, align(r.nbytes)) for r in live if r.first <= i <= r.last}  # in place: once
        assert sum(nbytes for _, nbytes in at_once) <= sealed.arena_nbytes


def llama_like(num_layers: int) -> Program:
    b = builder()
    embed = b.weight("embed", (96, WIDTH))
    rope = b.rope_table(inverse_frequencies(16, 1e4), 100)
    residual, delta = b.embedding(embed), None
    for layer in range(num_layers):
        norm, qkv = b.weight(f"{layer}.norm", (WIDTH,)), b.weight(f"{layer}.qkv", (2 * WIDTH, WIDTH))
        if delta is None:
            x = b.rms_norm(residual, norm, eps=1e-5)
        else:
            x, residual = b.add_rms_norm(delta, residual, norm, eps=1e-5)
        kv = b.kv(2, 16)
        delta = b.attention(
            b.rotary_store_kv(b.linear(x, qkv), kv, rope, q_heads=4), kv, q_heads=4, scale=0.25
        )
    x, _ = b.add_rms_norm(delta, residual, b.weight("last", (WIDTH,)), eps=1e-5)
    return b.build(b.linear(b.gather_sampled(x), embed))


def test_a_residual_is_added_to_in_place() -> None:
    sealed = seal(llama_like(4), LIMITS, Table())
    adds = [planned.op for planned in sealed.ops if isinstance(planned.op, AddRMSNorm)]
    assert len(adds) == 4
    assert {sealed.offset(op.residual) for op in adds} == {sealed.offset(op.out_sum) for op in adds}
    for op in adds:
        assert sealed.offset(op.out) != sealed.offset(op.out_sum)


def test_a_residual_that_is_read_later_is_kept() -> None:
    b = builder()
    embed, norm = b.weight("embed", (96, WIDTH)), b.weight("norm", (WIDTH,))
    b.kv(2, 16)
    x = b.embedding(embed)
    residual = b.embedding(embed)
    _, total = b.add_rms_norm(x, residual, norm, eps=1e-5)
    out, _ = b.add_rms_norm(total, residual, norm, eps=1e-5)
    sealed = seal(b.build(b.linear(b.gather_sampled(out), embed)), LIMITS, Table())
    assert sealed.offset(total) != sealed.offset(residual)


def test_the_arena_does_not_grow_with_depth() -> None:
    sizes = {seal(llama_like(n), LIMITS, Table({"attention": 4096})).arena_nbytes for n in (2, 5, 30)}
    assert len(sizes) == 1


def test_weights_and_tables_lie_apart_and_aligned() -> None:
    program = llama_like(3)
    table = Table()
    sealed = seal(program, LIMITS, table)
    places = [(sealed.weight_offsets[w.id], table.weight_nbytes(w)) for w in program.weights]
    places += [(sealed.rope_offsets[r.id], r.nbytes) for r in program.ropes]
    end = 0
    for offset, nbytes in sorted(places):
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + nbytes
    assert end <= sealed.weights_nbytes < end + ALIGNMENT


def test_every_reason_is_listed() -> None:
    table = Table(unserved={"attention": "no kernel for heads of 16", "gather_rows": "no kernel"})
    with pytest.raises(ProgramError) as caught:
        seal(llama_like(3), LIMITS, table)
    assert str(caught.value) == (
        "the paper backend does not serve 'test':\n"
        "  - attention: no kernel for heads of 16 (3 ops)\n"
        "  - gather_rows: no kernel (1 ops)"
    )


def test_logits_that_nothing_writes_are_refused() -> None:
    program = llama_like(1)
    other = Buf(999, DType.F32, (Dim.SAMPLED, 96))
    broken = Program(
        name="broken",
        ops=program.ops,
        weights=program.weights,
        ropes=program.ropes,
        kv_layers=program.kv_layers,
        kv_groups=program.kv_groups,
        logits=other,
        vocab_size=96,
    )
    with pytest.raises(ProgramError, match=r"nothing writes the logits, %999, of program 'broken'"):
        seal(broken, LIMITS, Table())


def test_reading_before_writing_is_refused() -> None:
    program = llama_like(1)
    broken = Program(
        name="broken",
        ops=program.ops[1:],
        weights=program.weights,
        ropes=program.ropes,
        kv_layers=program.kv_layers,
        kv_groups=program.kv_groups,
        logits=program.logits,
        vocab_size=96,
    )
    with pytest.raises(ProgramError, match=r"op 0, rms_norm, reads %0 before anything wrote it"):
        seal(broken, LIMITS, Table())


def test_limits() -> None:
    assert [LIMITS.of(dim) for dim in Dim] == [24, 4, 4]
    assert LIMITS.max_blocks == 7  # 100 positions in blocks of 16


#: embed 24,576 + qkv 32,768 + norm 256 + last 256 + rope 6,400; a block: 2 * 2 * 16 * 16 * 2 bytes.
#: The arena is full during the linear: 4,096 for its output, and twice 2,048.
LISTING = """\
program tiny  backend paper
  T <= 8 tokens, S <= 2 sequences, R <= 2 sampled rows, context 100
  arena 8,192 B, weights 64,256 B, KV 2,048 B a block
  group 0: full attention, 1 layers
  $rope0: f32[100, 16]

%0:f32[T, 64]+0x1000 = embedding(@embed:f32[96, 64], scale=1.0)  # embedding
%1:f32[T, 64]+0x1800 = rms_norm(%0, @norm:f32[64], eps=1e-05)  # rms_norm
%2:f32[T, 128]+0x0 = linear(%1, @qkv:f32[128, 64])  # linear
%3:f32[T, 64]+0x1800 = rotary_store_kv(%2, kv0, $rope0, q_heads=4)  # rotary_store_kv
%4:f32[T, 64]+0x0 = attention(%3, kv0, q_heads=4, scale=0.25)  # attention
%6:f32[T, 64]+0x800, %5:f32[T, 64]+0x1000 = add_rms_norm(%4, %0, @last:f32[64], eps=1e-05)  # add_rms_norm
%7:f32[R, 64]+0x300 = gather_rows(%6)  # gather_rows
%8:f32[R, 96]+0x0 = linear(%7, @embed:f32[96, 64])  # linear
"""


def test_dump() -> None:
    b = builder("tiny")
    embed = b.weight("embed", (96, WIDTH))
    qkv = b.weight("qkv", (2 * WIDTH, WIDTH))
    rope, kv = b.rope_table(inverse_frequencies(16, 1e4), 100), b.kv(2, 16)
    x = b.embedding(embed)
    normed = b.rms_norm(x, b.weight("norm", (WIDTH,)), eps=1e-5)
    q = b.rotary_store_kv(b.linear(normed, qkv), kv, rope, q_heads=4)
    attended = b.attention(q, kv, q_heads=4, scale=0.25)
    out, _ = b.add_rms_norm(attended, x, b.weight("last", (WIDTH,)), eps=1e-5)
    program = b.build(b.linear(b.gather_sampled(out), embed))
    sealed = seal(program, Limits(max_tokens=8, max_seqs=2, max_sampled=2, max_model_len=100), Table())
    assert sealed.dump() == LISTING
