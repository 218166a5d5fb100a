"""Paged attention of the torch backend: right, the same in chunks, and blind to what is masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.backends.torch.attention import Items, attention
from octavo.backends.torch.rotary import kv_views
from octavo.program.ir import BLOCK_SIZE, KV, DType

F32Array = npt.NDArray[np.float32]
HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = DIM**-0.5
U = 2.0**-24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread costs more than it computes, the more so on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Sequence:
    """A whole sequence's q, k and v [length, heads, DIM], and its blocks."""

    q: F32Array
    k: F32Array
    v: F32Array
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.q)


@dataclass
class Memory:
    """Pages full of `filler`, but for what was stored; block ids are dealt in a random order."""

    kv: KV
    filler: float
    num_blocks: int = 160

    def __post_init__(self) -> None:
        pages = torch.empty(self.num_blocks, self.kv.page_nbytes, dtype=torch.uint8)
        self.k, self.v = kv_views(pages, self.kv)
        self.k.fill_(self.filler)
        self.v.fill_(self.filler)
        self.free = np.random.default_rng(0).permutation(self.num_blocks).tolist()

    def store(self, sequence: Sequence) -> None:
        sequence.blocks = [self.free.pop() for _ in range(-(-sequence.length // BLOCK_SIZE))]
        slots = np.arange(sequence.length)
        blocks, offsets = np.array(sequence.blocks)[slots // BLOCK_SIZE], slots % BLOCK_SIZE
        self.k[blocks, :, :, offsets] = torch.from_numpy(sequence.k).to(self.k.dtype)
        self.v[blocks, :, offsets, :] = torch.from_numpy(sequence.v).to(self.v.dtype)

    def attend(self, parts: list[tuple[Sequence, int, int]], junk: int = 0) -> list[torch.Tensor]:
        """One step: each sequence's tokens [start, stop), with KV up to `stop`."""
        counts = [stop - start for _, start, stop in parts]
        cu_q = np.cumsum([0, *counts]).astype(np.int32)
        seq_lens = np.array([stop for _, _, stop in parts], np.int32)
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in parts]).astype(np.int32)
        table = np.full((len(parts), 64), junk, np.int32)
        for row, (sequence, start, stop) in zip(table, parts, strict=True):
            blocks = sequence.blocks[: -(-stop // BLOCK_SIZE)]
            row[: len(blocks)] = blocks
            if self.kv.window is not None:  # blocks that slid out belong to others by now
                row[: max(0, start - self.kv.window + 1) // BLOCK_SIZE] = junk
        q = np.concatenate([sequence.q[start:stop] for sequence, start, stop in parts])
        items = Items.build(cu_q, seq_lens, table, positions, self.kv.window)
        out = attention(torch.from_numpy(q.reshape(len(q), -1).copy()), self.k, self.v, items, self.kv, SCALE)
        return list(out.split(counts))


def kv(dtype: DType = DType.F32, window: int | None = None) -> KV:
    return KV(0, KV_HEADS, DIM, dtype, window)


def random_sequence(length: int, seed: int = 0) -> Sequence:
    rng = np.random.default_rng(seed)

    def normal(heads: int) -> F32Array:
        # What f16 holds exactly, so that one reference serves both caches.
        return rng.normal(size=(length, heads, DIM)).astype(np.float16).astype(np.float32)

    return Sequence(normal(HEADS) * 2, normal(KV_HEADS), normal(KV_HEADS))


def reference(sequence: Sequence, window: int | None = None) -> npt.NDArray[np.float64]:
    """Softmax attention in float64, [length, HEADS * DIM]."""
    q, k, v = (a.astype(np.float64) for a in (sequence.q, sequence.k, sequence.v))
    k, v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * SCALE
    at = np.arange(sequence.length)
    hidden = at[None, :] > at[:, None]
    if window is not None:
        hidden |= at[None, :] <= at[:, None] - window
    scores[:, hidden] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", p, v).reshape(sequence.length, -1)


def tolerance(sequence: Sequence) -> float:
    """A score of D products is off by (D + 2) u times its terms, and exp hands that on; then exp by an
    ulp, and sums of the tiles (64 in a tree or in order), of tiles and of splits, on l and on o."""
    terms = SCALE * np.abs(sequence.q).max() * np.abs(sequence.k).max() * DIM
    sums = 64 + sequence.length / 64 + 4
    return float(((DIM + 2) * U * terms + 2 * sums * U) * np.abs(sequence.v).max())


LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 513, 600]


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
@pytest.mark.parametrize("length", LENGTHS)
def test_against_float64(length: int, dtype: DType) -> None:
    memory, sequence = Memory(kv(dtype), torch.nan), random_sequence(length)
    memory.store(sequence)
    (found,) = memory.attend([(sequence, 0, length)])
    assert np.abs(found.numpy() - reference(sequence)).max() < tolerance(sequence)


@pytest.mark.parametrize("window", [1, 5, 16, 64, 100])
def test_windows_against_float64(window: int) -> None:
    memory, sequence = Memory(kv(window=window), torch.nan), random_sequence(200)
    memory.store(sequence)
    (found,) = memory.attend([(sequence, 0, 200)])
    assert np.abs(found.numpy() - reference(sequence, window)).max() < tolerance(sequence)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_do_not_change_a_bit(chunk: int, window: int | None) -> None:
    """At the beginning, and across the border of a KV split."""
    memory, sequence = Memory(kv(DType.F16, window), torch.nan), random_sequence(540)
    memory.store(sequence)
    (whole,) = memory.attend([(sequence, 0, 540)])
    for first, last in ((0, 70), (500, 540)):
        for start in range(first, last, chunk):
            stop = min(start + chunk, 540)
            (found,) = memory.attend([(sequence, start, stop)])
            assert torch.equal(found, whole[start:stop])


def test_a_sequence_alone_is_the_sequence_in_any_batch() -> None:
    memory = Memory(kv(), torch.nan)
    sequences = [random_sequence(length, seed=length) for length in (1, 700, 33, 64, 200)]
    for sequence in sequences:
        memory.store(sequence)
    parts = [
        (s, max(0, s.length - count), s.length) for s, count in zip(sequences, (1, 3, 33, 20, 1), strict=True)
    ]
    alone = [memory.attend([part])[0] for part in parts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [2, 3], [1, 0]):
        together = memory.attend([parts[i] for i in order])
        for i, found in zip(order, together, strict=True):
            assert torch.equal(found, alone[i])


@pytest.mark.parametrize("filler", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("window", [None, 40])
def test_what_lies_in_free_and_masked_slots_stays_there(filler: float, window: int | None) -> None:
    """Other blocks, the rest of the last block, and the sequence's own future."""
    clean, dirty = Memory(kv(window=window), 0.0), Memory(kv(window=window), filler)
    sequence = random_sequence(150)
    clean.store(sequence)
    dirty.store(sequence)
    for start, stop in ((0, 20), (100, 101), (70, 150), (149, 150)):
        (expected,) = clean.attend([(sequence, start, stop)])
        seen = sequence.blocks[stop // BLOCK_SIZE : stop // BLOCK_SIZE + 1]
        for block in seen:  # what comes after `stop` in the last block
            dirty.k[block, :, :, stop % BLOCK_SIZE :] = filler
            dirty.v[block, :, stop % BLOCK_SIZE :, :] = filler
        (found,) = dirty.attend([(sequence, start, stop)])
        assert torch.equal(found, expected)
        for position in range(stop, 150):
            block, offset = sequence.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            dirty.k[block, :, :, offset] = torch.from_numpy(sequence.k[position])
            dirty.v[block, :, offset, :] = torch.from_numpy(sequence.v[position])


def test_a_row_that_sees_a_poisoned_position_is_poisoned_alone() -> None:
    memory, sequence = Memory(kv(), 0.0), random_sequence(60)
    memory.store(sequence)
    (clean,) = memory.attend([(sequence, 0, 60)])
    memory.v[sequence.blocks[2], 1, 3, 5] = torch.nan  # position 35
    (found,) = memory.attend([(sequence, 0, 60)])
    assert torch.equal(found[:35], clean[:35])
    assert found[35:].isnan().any(dim=1).all()


def test_a_poisoned_query_keeps_it_to_itself() -> None:
    memory, sequence = Memory(kv(), 0.0), random_sequence(60)
    memory.store(sequence)
    (clean,) = memory.attend([(sequence, 0, 60)])
    sequence.q[20, 1, 3] = np.nan
    (found,) = memory.attend([(sequence, 0, 60)])
    others = [i for i in range(60) if i != 20]
    assert torch.equal(found[others], clean[others])
    assert found[20].isnan().any()


@pytest.mark.parametrize("junk", [-1, 10**6])
@pytest.mark.parametrize("window", [None, 20])
def test_a_table_may_hold_anything_where_nobody_looks(junk: int, window: int | None) -> None:
    memory = Memory(kv(window=window), torch.nan)
    short, long = random_sequence(10), random_sequence(200, seed=1)
    memory.store(short)
    memory.store(long)
    parts = [(short, 5, 10), (long, 130, 200)]
    expected = memory.attend(parts)
    found = memory.attend(parts, junk=junk)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    memory, sequence = Memory(kv(), torch.nan), random_sequence(100)
    sequence.q *= 300
    memory.store(sequence)
    (found,) = memory.attend([(sequence, 0, 100)])
    assert found.isfinite().all()
    assert np.abs(found.numpy() - reference(sequence)).max() < tolerance(sequence)
