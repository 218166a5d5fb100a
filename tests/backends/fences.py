"""Fences between all that a program touches, so that what is touched without right shows.

Every buffer, weight and scratch memory gets a place of its own with a fence on either side. Fences hold NaN;
`check` says whether somebody wrote there. Under AddressSanitizer they are poisoned besides, and so are the
rows that a step does not have and the KV blocks of nobody: whoever as much as reads there is stopped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from harness import F32Array, Rig, Seq

from octavo.backends.base import DeviceMemory
from octavo.program.ir import Buf
from octavo.program.planner import ALIGNMENT, SealedProgram

FENCE = 4 * ALIGNMENT
_runtime = ctypes.CDLL(None)
SANITIZED = hasattr(_runtime, "__asan_poison_memory_region")


class _Layout:
    """Pieces one after the other, a fence before, between and after them."""

    def __init__(self) -> None:
        self.fences: list[tuple[int, int]] = []
        self.nbytes = 0
        self._place_fence()

    def place(self, nbytes: int) -> int:
        """The offset of a piece; its fence begins with the byte after it."""
        offset = self.nbytes
        self.nbytes += nbytes
        self._place_fence()
        return offset

    def _place_fence(self) -> None:
        begin = self.nbytes
        self.nbytes = -(-(begin + FENCE) // ALIGNMENT) * ALIGNMENT
        self.fences.append((begin, self.nbytes))


class FencedRig(Rig):
    """A Rig whose program lies between fences."""

    def check(self) -> None:
        """Raise AssertionError if somebody wrote into a fence."""
        if SANITIZED:
            return  # it would have been stopped
        for memory, layout in ((self.memory.arena, self._arena), (self.memory.weights, self._weights)):
            for begin, end in layout.fences:
                assert bool((memory[begin:end] == 0xFF).all()), f"written to between {begin} and {end}"

    def run(self, batch: Sequence[tuple[Seq, int]]) -> F32Array:
        """A step with the logits of every token, which may touch nothing but its own rows and blocks."""
        counts = self.fill(batch, "all")
        bars = self._bars(counts[0], batch)
        _poison(bars)
        try:
            logits = np.array(self.backend.run(*counts).numpy())
        finally:
            _unpoison(bars)
        self.check()
        for seq, n in batch:
            seq.num_computed += n
        return logits

    def close(self) -> None:
        """Take the fences away, for whoever gets the memory next."""
        _unpoison(self._fence_ranges)
        self.backend.close()

    def _bars(self, num_tokens: int, batch: Sequence[tuple[Seq, int]]) -> list[tuple[int, int]]:
        """Rows that a step of so many tokens, all sampled, does not have, and blocks that are not its."""
        arena, kv = self.memory.arena.data_ptr(), self.memory.kv
        bars = [
            (arena + offset + num_tokens * row_nbytes, (rows - num_tokens) * row_nbytes)
            for offset, rows, row_nbytes in self._rows
        ]
        for storage in range(kv.shape[0]):
            groups = [g for g, group in enumerate(self.program.kv_groups) if storage < len(group.layers)]
            used = {block for seq, _ in batch for g in groups if seq.blocks for block in seq.blocks[g]}
            bars += [
                (kv[storage, block].data_ptr(), kv.shape[2])
                for block in range(kv.shape[1])
                if block not in used
            ]
        return bars

    def _lay_out(self, sealed: SealedProgram) -> SealedProgram:
        self._arena, self._weights = _Layout(), _Layout()
        self._rows: list[tuple[int, int, int]] = []  # offset, rows and bytes of a row
        offsets: dict[int, int] = {}
        scratch = []
        for planned in sealed.ops:
            for buf in planned.op.writes:
                heir = _heir(sealed, buf, planned.op.reads)
                if heir is not None:
                    offsets[buf.id] = offsets[heir.id]
                    continue
                rows, row_nbytes = sealed.limits.of(buf.rows), buf.width * buf.dtype.nbytes
                offsets[buf.id] = self._arena.place(rows * row_nbytes)
                self._rows.append((offsets[buf.id], rows, row_nbytes))
            scratch.append(self._arena.place(planned.kernel.scratch_nbytes))
        table, program = self.backend.table, sealed.program
        return replace(
            sealed,
            ops=tuple(replace(op, scratch=at) for op, at in zip(sealed.ops, scratch, strict=True)),
            offsets=offsets,
            weight_offsets={w.id: self._weights.place(table.weight_nbytes(w)) for w in program.weights},
            rope_offsets={rope.id: self._weights.place(rope.nbytes) for rope in program.ropes},
            arena_nbytes=self._arena.nbytes,
            weights_nbytes=self._weights.nbytes,
        )

    def _allocate(self, num_blocks: int) -> DeviceMemory:
        memory = super()._allocate(num_blocks)
        self._fence_ranges = [
            (part.data_ptr() + begin, end - begin)
            for part, layout in ((memory.arena, self._arena), (memory.weights, self._weights))
            for begin, end in layout.fences
        ]
        _poison(self._fence_ranges)
        return memory


def _heir(sealed: SealedProgram, buf: Buf, reads: tuple[Buf, ...]) -> Buf | None:
    """The input that an output takes over: both are alive during the op, so only then they share bytes."""
    return next((read for read in reads if sealed.offset(read) == sealed.offset(buf)), None)


def _poison(ranges: list[tuple[int, int]]) -> None:
    if SANITIZED:
        for address, nbytes in ranges:
            _runtime.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _unpoison(ranges: list[tuple[int, int]]) -> None:
    if SANITIZED:
        for address, nbytes in ranges:
            _runtime.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
