"""rotary_store_kv and attention on the native backend: one contract for decode and chunked prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from harness import (
    NATIVE_ISAS,
    NATIVE_VARIANTS,
    TORCH_DTYPES,
    UNIT,
    F32Array,
    Heads,
    Rig,
    Seq,
    assert_same_bits,
    attention_only,
    bits,
    inv_freq,
    random_values,
    rope_values,
    stored,
)

from octavo.backends.base import Backend
from octavo.backends.native import library
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.backend import TorchBackend
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import BLOCK_SIZE, Buf, DType
from octavo.program.planner import Limits

pytestmark = pytest.mark.skipif(not library.available(), reason="the native library is not built")

MakeRig = Callable[..., Rig]
F64Array = npt.NDArray[np.float64]
DTYPES = list(DType)
VOCAB = 128


def tokens(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, length)]


class Layer:
    """Makes rigs of one attention layer with the same weights and room for `length` positions."""

    def __init__(self, make_rig: MakeRig, heads: Heads, length: int, dtype: DType, seqs: int = 4) -> None:
        self.heads, self.length = heads, length
        self._make, self._dtype = make_rig, dtype
        self.values = random_values("qkv", (VOCAB, heads.qkv_width)) * np.float32(heads.qkv_width**0.5)
        self._limits = Limits(length, seqs, length, length)
        self._blocks = seqs * (-(-length // BLOCK_SIZE)) + 2

    def rig(self, threads: int = 2, isa: str = "auto", **options: Any) -> Rig:
        """A rig; its block order is a function of `seed`."""
        return self.rig_on(NativeBackend(threads, isa), **options)

    def rig_on(self, backend: Backend, **options: Any) -> Rig:
        """A rig on any backend."""
        return self._make(
            backend,
            attention_only(self.heads, VOCAB, self.length),
            weights={"qkv": stored(self.values)},
            kv_dtype=self._dtype,
            limits=self._limits,
            num_blocks=self._blocks,
            **options,
        )

    def split(self, token_ids: list[int]) -> tuple[F32Array, F32Array, F32Array]:
        """q, k, v of tokens before rotation, each [T, heads, dim]."""
        h = self.heads
        rows = self.values[token_ids].reshape(len(token_ids), -1, h.dim)
        return rows[:, : h.q], rows[:, h.q : h.q + h.kv], rows[:, h.q + h.kv :]


def by_chunks(rig: Rig, token_ids: list[int], chunk: int) -> F32Array:
    """A sequence's outputs at every position, computed `chunk` tokens a step."""
    seq = Seq(token_ids)
    outs = []
    while seq.num_computed < len(token_ids):
        outs += rig.step([(seq, min(chunk, len(token_ids) - seq.num_computed))])
    rig.release(seq)
    return np.concatenate(outs)


def rotate(x: F32Array, rotary_dim: int) -> F32Array:
    """The contract's rotation of x [T, heads, dim] at positions 0 .. T-1; numpy rounds each operation."""

    class Table:
        max_positions, scale, inv_freq = len(x), 1.0, inv_freq(rotary_dim)

    table: Any = Table
    cos, sin = np.split(rope_values(table)[:, None, :], 2, axis=2)
    half = rotary_dim // 2
    a, b = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], axis=2)


def reference(
    q: F64Array, k: F64Array, v: F64Array, heads: Heads, sinks: F32Array | None = None
) -> tuple[F64Array, F64Array]:
    """Attention in float64, and a bound on what f32 may differ by; q [T, H, D], k and v [T, HK, D].

    A score is a chain of D fma and a product by the scale: off by (D + 2) UNIT sum |q k|. A weight
    is exp of it, less the maximum: relatively off by twice that, and by 8 UNIT for exp and its
    argument's rounding at up to 87. Sums over n tokens and the quotient add n + 8 UNIT. A softcap lessens
    a score's error and adds 5 UNIT of the cap: its tanh's.
    """
    group = heads.q // heads.kv
    n = len(q)
    out, bound = np.zeros((n, heads.q, heads.dim)), np.zeros((n, heads.q, heads.dim))
    visible = np.tril(np.ones((n, n), bool))
    if heads.window is not None:
        visible &= ~np.tril(np.ones((n, n), bool), -heads.window)
    for h in range(heads.q):
        keys, values = k[:, h // group], v[:, h // group]
        scale = heads.dim**-0.5
        scores = np.where(visible, scale * q[:, h] @ keys.T, -np.inf)
        if heads.softcap is not None:
            scores = np.where(visible, heads.softcap * np.tanh(scores / heads.softcap), -np.inf)
        top = scores.max(axis=1, keepdims=True)
        p = np.exp(scores - top)
        p /= p.sum(axis=1, keepdims=True) + (0 if sinks is None else np.exp(sinks[h] - top))
        out[:, h] = p @ values
        magnitude = np.where(visible, scale * np.abs(q[:, h]) @ np.abs(keys).T, 0).max(axis=1)
        magnitude = magnitude * (heads.dim + 2) + 5 * (heads.softcap or 0)
        relative = UNIT * (2 * magnitude + 2 * 87 + n + 16)
        bound[:, h] = 2 * relative[:, None] * (p @ np.abs(values))
    return out.reshape(n, -1), bound.reshape(n, -1)


# -- rotation and the cache ---------------------------------------------------------------------


def rounded(x: F32Array, dtype: DType) -> F32Array:
    """x as a cache of that type holds it."""
    return torch.from_numpy(x).to(TORCH_DTYPES[dtype]).float().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [Heads(4, 2, 16), Heads(3, 1, 40, rotary_dim=28), Heads(2, 2, 8, rotary_dim=4)]
)
def test_the_cache_holds_rotated_keys_and_values(make_rig: MakeRig, heads: Heads, dtype: DType) -> None:
    layer = Layer(make_rig, heads, 50, dtype)
    ids = tokens(50)
    _, k, v = layer.split(ids)
    for isa, threads in NATIVE_VARIANTS:
        rig = layer.rig(threads, isa)
        seq = Seq(ids)
        rig.step([(seq, 20)])
        rig.step([(seq, 30)])
        keys, values = rig.stored_kv(seq, 0)
        np.testing.assert_array_equal(keys, rounded(rotate(k, heads.rotary_dim or heads.dim), dtype))
        np.testing.assert_array_equal(values, rounded(v, dtype))
        unused = np.setdiff1d(np.arange(rig.memory.kv.shape[1]), seq.blocks[0])
        assert (rig.memory.kv.numpy()[:, unused] == 0xFF).all()


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_q_is_rotated_too(make_rig: MakeRig, isa: str) -> None:
    def build(b: ProgramBuilder) -> Buf:
        kv = b.kv(2, 16)
        qkv = b.embedding(b.weight("qkv", (VOCAB, 8 * 16)))
        return b.gather_sampled(b.rotary_store_kv(qkv, kv, b.rope_table(inv_freq(12), 64), q_heads=4))

    rig = make_rig(NativeBackend(1, isa), build)
    ids = tokens(33)
    q = rig.value("qkv")[ids].reshape(33, 8, 16)[:, :4]
    assert_same_bits(rig.rows(ids), rotate(q, 12).reshape(33, -1))


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_16_bits_round_to_nearest_even(make_rig: MakeRig, isa: str, dtype: DType) -> None:
    """Every value, the ties between neighbours and what lies next to a tie; overflow and NaN."""
    if dtype is DType.F16:
        exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    else:
        exact = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    ties = exact[:-1] + (exact[1:] - exact[:-1]) / 2
    special = np.array(
        [65504, 65519.996, 65520, 65536, 3.4e38, np.inf, np.nan, 2.0**-25, 2.0**-26, 1e-40], np.float32
    )
    values = np.concatenate([exact, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), special])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = np.pad(values, (0, -len(values) % (VOCAB * 256))).reshape(-1, VOCAB, 256)
    heads = Heads(1, 1, 256)
    layer = Layer(make_rig, heads, VOCAB, dtype)
    for v in values:
        layer.values = np.concatenate([np.zeros((VOCAB, 512), np.float32), v], axis=1)
        rig = layer.rig(1, isa)
        seq = Seq(list(range(VOCAB)))
        rig.step([(seq, VOCAB)])
        _, found = rig.stored_kv(seq, 0)
        assert_same_bits(found[:, 0].astype(np.float32), rounded(v, dtype))


# -- attention ----------------------------------------------------------------------------------

SHAPES = [
    Heads(4, 2, 16),
    Heads(9, 3, 8),  # three rows a token: tiles of six are two tokens
    Heads(8, 1, 24),  # more heads than rows go together
    Heads(2, 2, 64),
    Heads(10, 2, 40, window=70),
    Heads(3, 1, 16, window=16),
    Heads(4, 2, 16, softcap=2.0),
    Heads(6, 2, 24, sinks=True),
    Heads(9, 3, 8, window=70, softcap=3.0, sinks=True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "length"), [*((heads, 200) for heads in SHAPES), (Heads(2, 1, 8), 1100)])
def test_close_to_float64(make_rig: MakeRig, heads: Heads, length: int, dtype: DType) -> None:
    layer = Layer(make_rig, heads, length, dtype)
    rig = layer.rig()
    seq = Seq(tokens(length))
    (out,) = rig.step([(seq, length)])
    q, _, _ = layer.split(seq.token_ids)
    sinks = rig.value("sinks").reshape(-1) if heads.sinks else None
    q64 = rotate(q, heads.dim).astype(np.float64)
    expected, bound = reference(q64, *rig.stored_kv(seq, 0), heads, sinks)
    assert (np.abs(out - expected) <= bound).all()
    (by_torch,) = layer.rig_on(TorchBackend(num_threads=1)).step([(Seq(tokens(length)), length)])
    assert (np.abs(out - by_torch) <= 2 * bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
def test_every_build_and_thread_count_gives_the_same_bits(
    make_rig: MakeRig, heads: Heads, dtype: DType
) -> None:
    layer = Layer(make_rig, heads, 600, dtype)
    ids = tokens(600)
    for chunk in (600, 45):
        outs = [by_chunks(layer.rig(threads, isa), ids, chunk) for isa, threads in NATIVE_VARIANTS]
        for out, variant in zip(outs, NATIVE_VARIANTS, strict=True):
            assert_same_bits(out, outs[0], f"{variant}, chunks of {chunk}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [*SHAPES, Heads(6, 2, 16, window=700)])
def test_decode_equals_chunked_prefill_equals_whole(make_rig: MakeRig, heads: Heads, dtype: DType) -> None:
    """1300 positions cross the splits at 512 and 1024."""
    layer = Layer(make_rig, heads, 1300, dtype)
    rig = layer.rig()
    ids = tokens(1300)
    whole = by_chunks(rig, ids, 1300)
    assert not np.isnan(whole).any()
    for chunk in (1, 7, 16, 64):
        assert_same_bits(by_chunks(rig, ids, chunk), whole, f"chunks of {chunk}")


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 130, 512, 513])
def test_windows(make_rig: MakeRig, window: int) -> None:
    """Contexts around and far beyond the window; what slid out may be overwritten."""
    heads = Heads(4, 2, 16, window=window)
    lengths = [n for n in (window - 1, window, window + 1, 5 * window) if n > 0]
    layer = Layer(make_rig, heads, max(lengths), DType.F16)
    rig = layer.rig()
    for length in lengths:
        ids = tokens(length, seed=length)
        whole = by_chunks(rig, ids, length)
        seq = Seq(ids)
        rig.step([(seq, length)])
        q, _, _ = layer.split(ids)
        if length < 1000:
            q64 = rotate(q, heads.dim).astype(np.float64)
            expected, bound = reference(q64, *rig.stored_kv(seq, 0), heads)
            assert (np.abs(whole - expected) <= bound).all()
        rig.release(seq)
        assert_same_bits(by_chunks(rig, ids, 33), whole, f"{length} positions")
        # The last token alone, with NaN wherever it must not look, and tables that name no block.
        rig.step([(seq, length - 1)] if length > 1 else [])
        k, v = rig.pages(0)
        first_seen = max(0, length - window)
        for position in range(first_seen):
            block, offset = seq.blocks[0][position // BLOCK_SIZE], position % BLOCK_SIZE
            k[block, :, :, offset] = v[block, :, offset] = np.nan
        gone = first_seen // BLOCK_SIZE
        if gone:
            seq.blocks[0][:gone] = [10**6] * gone
        (last,) = rig.step([(seq, 1)])
        assert_same_bits(last, whole[-1:], f"decode at {length}")
        seq.blocks[0] = seq.blocks[0][gone:]
        rig.release(seq)
        rig = layer.rig()


def test_where_blocks_lie_does_not_matter(make_rig: MakeRig) -> None:
    layer = Layer(make_rig, Heads(6, 2, 16), 300, DType.F16)
    ids = tokens(300)
    outs = [by_chunks(layer.rig(seed=seed), ids, 50) for seed in range(3)]
    assert_same_bits(outs[0], outs[1])
    assert_same_bits(outs[0], outs[2])


@pytest.mark.parametrize("heads", SHAPES)
def test_company_does_not_matter(make_rig: MakeRig, heads: Heads) -> None:
    """Decodes and prefills of four sequences in one step, each as alone."""
    layer = Layer(make_rig, heads, 700, DType.F16)
    rig = layer.rig()
    lengths = [(600, 1), (0, 70), (37, 20), (511, 2)]
    seqs, alone = [], []
    for i, (context, new) in enumerate(lengths):
        ids = tokens(context + new, seed=i)
        alone.append(by_chunks(rig, ids, len(ids))[context:])
        seqs.append(Seq(ids))
        if context:
            rig.step([(seqs[-1], context)])
    together = rig.step([(seq, new) for seq, (_, new) in zip(seqs, lengths, strict=True)])
    for i in range(4):
        assert_same_bits(together[i], alone[i], f"sequence {i}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_masked_may_be_nan(make_rig: MakeRig, dtype: DType) -> None:
    """NaN in free blocks, in other sequences' blocks, and in the slots after the last token."""
    layer = Layer(make_rig, Heads(6, 2, 16), 200, dtype)
    rig = layer.rig()
    ids = tokens(150)
    expected = by_chunks(rig, ids, 150)
    mine, other = Seq(ids), Seq(tokens(60, seed=1))
    rig.step([(mine, 100), (other, 59)])
    k, v = rig.pages(0)
    others = np.setdiff1d(np.arange(len(k)), mine.blocks[0])
    k[others] = v[others] = np.nan
    tail = mine.blocks[0][100 // BLOCK_SIZE]
    k[tail, :, :, 100 % BLOCK_SIZE :] = v[tail, :, 100 % BLOCK_SIZE :] = np.nan
    decoded, poisoned = rig.step([(mine, 1), (other, 1)])
    assert_same_bits(decoded, expected[100:101])
    assert np.isnan(poisoned).all()
    assert_same_bits(rig.step([(mine, 49)])[0], expected[101:])


def test_what_is_seen_and_nan_shows(make_rig: MakeRig) -> None:
    """A NaN or infinite key reaches the rows that see it and no others; a NaN value its own column."""
    heads = Heads(2, 1, 16)
    layer = Layer(make_rig, heads, 100, DType.F32)
    ids = tokens(100)
    expected = by_chunks(layer.rig(), ids, 100)
    outs = []
    for isa, threads in NATIVE_VARIANTS:
        rig = layer.rig(threads, isa)
        seq = Seq(ids)
        rig.step([(seq, 80)])
        k, v = rig.pages(0)
        v[seq.blocks[0][1], 0, 3, 5] = np.nan
        (out,) = rig.step([(seq, 10)])
        columns = np.arange(32) % 16 == 5
        assert np.isnan(out[:, columns]).all()
        assert_same_bits(out[:, ~columns], expected[80:90][:, ~columns])
        k[seq.blocks[0][2], 0, 7, 4] = np.nan
        (out,) = rig.step([(seq, 10)])
        assert np.isnan(out).all()
        outs.append(out)
    assert (bits(outs[0]) == bits(outs[1])).all()
