"""Seals a program for one backend and one set of limits.

Liveness of every buffer, one arena that holds them all, a kernel for every op. Rule: after sealing
nothing is left to decide, and every byte a step touches has an address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.errors import ProgramError
from octavo.program.ir import (
    BLOCK_SIZE,
    KV,
    Add,
    AddRMSNorm,
    Buf,
    Dim,
    Op,
    Program,
    RopeTable,
    ScaleLogits,
    Weight,
)

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step: tokens, sequences and sampled rows in it, and positions of a sequence."""

    max_tokens: int
    max_seqs: int
    max_sampled: int
    max_model_len: int

    @property
    def max_blocks(self) -> int:
        """KV blocks of the longest sequence: the width of a block table."""
        return -(-self.max_model_len // BLOCK_SIZE)

    def of(self, dim: Dim) -> int:
        """The largest size of a dimension."""
        return {
            Dim.TOKENS: self.max_tokens,
            Dim.SEQS: self.max_seqs,
            Dim.SAMPLED: self.max_sampled,
        }[dim]


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs an op: its name, and the bytes of scratch memory one call of it needs."""

    name: str
    scratch_nbytes: int = 0


class Unserved(Exception):
    """Raised by a KernelTable for an op it has no kernel for; the message is the reason."""


class KernelTable(Protocol):
    """What a backend can run, and how it stores parameters."""

    name: str

    def choose(self, op: Op, limits: Limits) -> Kernel:
        """The kernel for an op, or raise Unserved with the reason."""

    def weight_nbytes(self, weight: Weight) -> int:
        """Bytes of a parameter as this backend packs it."""


@dataclass(frozen=True, slots=True)
class PlannedOp:
    """An op with its kernel and the arena offset of its scratch memory."""

    op: Op
    kernel: Kernel
    scratch: int


@dataclass(frozen=True, slots=True)
class SealedProgram:
    """A program with an address for everything. Offsets are bytes into the arena."""

    program: Program
    limits: Limits
    backend: str
    ops: tuple[PlannedOp, ...]
    offsets: dict[int, int]  # Buf.id -> offset
    arena_nbytes: int
    weight_offsets: dict[int, int]  # Weight.id -> offset into the weights' memory
    rope_offsets: dict[int, int]  # RopeTable.id -> offset into the weights' memory
    weights_nbytes: int  # parameters and rope tables

    def offset(self, buf: Buf) -> int:
        """Where a buffer lies in the arena, in bytes."""
        return self.offsets[buf.id]

    def dump(self) -> str:
        """The listing, one op a line, that a person can read."""
        return dump(self)


def seal(program: Program, limits: Limits, table: KernelTable) -> SealedProgram:
    """Choose a kernel for each op and lay out memory; raise ProgramError with every reason if an op
    has no kernel."""
    kernels = _choose_kernels(program, limits, table)
    offsets, scratch, arena_nbytes = _lay_out_arena(program, kernels, limits)
    weight_offsets: dict[int, int] = {}
    rope_offsets: dict[int, int] = {}
    end = 0
    for weight in program.weights:
        weight_offsets[weight.id] = end
        end = _align(end + table.weight_nbytes(weight))
    for rope in program.ropes:
        rope_offsets[rope.id] = end
        end = _align(end + rope.nbytes)
    return SealedProgram(
        program=program,
        limits=limits,
        backend=table.name,
        ops=tuple(
            PlannedOp(op, kernel, place)
            for op, kernel, place in zip(program.ops, kernels, scratch, strict=True)
        ),
        offsets=offsets,
        arena_nbytes=arena_nbytes,
        weight_offsets=weight_offsets,
        rope_offsets=rope_offsets,
        weights_nbytes=end,
    )


def _choose_kernels(program: Program, limits: Limits, table: KernelTable) -> list[Kernel]:
    kernels: list[Kernel] = []
    reasons: dict[str, int] = {}
    for op in program.ops:
        try:
            kernels.append(table.choose(op, limits))
        except Unserved as why:
            reason = f"{op.kind}: {why}"
            reasons[reason] = reasons.get(reason, 0) + 1
    if reasons:
        listing = "\n".join(f"  - {reason} ({count} ops)" for reason, count in reasons.items())
        raise ProgramError(f"the {table.name} backend does not serve {program.name!r}:\n{listing}")
    return kernels


@dataclass(slots=True)
class _Interval:
    """Bytes that must not be shared during ops [first, last]."""

    nbytes: int
    first: int
    last: int
    offset: int = -1


def _lay_out_arena(
    program: Program, kernels: list[Kernel], limits: Limits
) -> tuple[dict[int, int], list[int], int]:
    """Greedy by size: place the largest interval first, at the lowest offset free of all intervals
    that live when it lives. Returns buffer offsets, each op's scratch offset, and the arena's size."""
    intervals: dict[int, _Interval] = {}
    owner: dict[int, int] = {}  # Buf.id -> Buf.id whose bytes it shares
    last_use = {buf.id: i for i, op in enumerate(program.ops) for buf in (*op.reads, *op.writes)}
    last_use[program.logits.id] = len(program.ops)  # read after the step
    for i, op in enumerate(program.ops):
        for buf in op.reads:
            if buf.id not in owner:
                raise ProgramError(f"op {i}, {op.kind}, reads {buf} before anything wrote it")
        for buf in op.writes:
            heir = _in_place(op, buf, i, last_use)
            if heir is not None:
                owner[buf.id] = owner[heir.id]
                intervals[owner[buf.id]].last = last_use[buf.id]
                continue
            owner[buf.id] = buf.id
            nbytes = limits.of(buf.rows) * buf.width * buf.dtype.nbytes
            intervals[buf.id] = _Interval(_align(nbytes), i, last_use[buf.id])
    if program.logits.id not in owner:
        raise ProgramError(f"nothing writes the logits, {program.logits}, of program {program.name!r}")
    scratch = [_Interval(_align(kernel.scratch_nbytes), i, i) for i, kernel in enumerate(kernels)]
    arena_nbytes = _place([*intervals.values(), *scratch])
    offsets = {buf: intervals[by].offset for buf, by in owner.items()}
    return offsets, [interval.offset for interval in scratch], arena_nbytes


def _in_place(op: Op, buf: Buf, index: int, last_use: dict[int, int]) -> Buf | None:
    """The input whose bytes this output may take over: it dies here and the contract allows it."""
    heir: Buf | None = None
    if (isinstance(op, AddRMSNorm) and buf is op.out_sum) or isinstance(op, Add):
        heir = op.residual
    elif isinstance(op, ScaleLogits):
        heir = op.x
    return heir if heir is not None and last_use[heir.id] == index else None


def _place(intervals: list[_Interval]) -> int:
    placed: list[_Interval] = []
    for interval in sorted(intervals, key=lambda i: (-i.nbytes, i.first)):
        if not interval.nbytes:
            interval.offset = 0
            continue
        offset = 0
        for other in sorted(placed, key=lambda i: i.offset):
            apart = other.last < interval.first or interval.last < other.first
            if apart or other.offset + other.nbytes <= offset:
                continue
            if other.offset >= offset + interval.nbytes:
                break
            offset = other.offset + other.nbytes
        interval.offset = offset
        placed.append(interval)
    return max((i.offset + i.nbytes for i in placed), default=0)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def dump(sealed: SealedProgram) -> str:
    """The listing of a sealed program: memory first, then each op with shapes, offsets and kernel."""
    program, limits = sealed.program, sealed.limits
    lines = [
        f"program {program.name}  backend {sealed.backend}",
        f"  T <= {limits.max_tokens} tokens, S <= {limits.max_seqs} sequences, "
        f"R <= {limits.max_sampled} sampled rows, context {limits.max_model_len}",
        f"  arena {sealed.arena_nbytes:,} B, weights {sealed.weights_nbytes:,} B, "
        f"KV {program.block_nbytes:,} B a block",
    ]
    lines += [
        f"  group {g}: {'full attention' if group.window is None else f'window {group.window}'}, "
        f"{len(group.layers)} layers"
        for g, group in enumerate(program.kv_groups)
    ]
    lines += [f"  {rope}: f32[{rope.max_positions}, {rope.rotary_dim}]" for rope in program.ropes]
    return "\n".join([*lines, "", *(_line(sealed, planned) for planned in sealed.ops)]) + "\n"


def _line(sealed: SealedProgram, planned: PlannedOp) -> str:
    op = planned.op
    outs = ", ".join(
        f"{b}:{b.dtype}[{', '.join(map(str, b.shape))}]+{sealed.offset(b):#x}" for b in op.writes
    )
    handles = [str(b) for b in op.reads]
    handles += [f"{w}:{w.format}[{', '.join(map(str, w.shape))}]" for w in op.weights]
    handles += [
        str(getattr(op, name))
        for name in ("kv", "rope")
        if isinstance(getattr(op, name, None), (RopeTable, KV))
    ]
    attributes = [f"{k}={v}" for k, v in op.attributes.items()]
    return f"{outs} = {op.kind}({', '.join(handles + attributes)})  # {planned.kernel.name}"
