"""Paged attention in fixed tiles.

Queries go in items of ITEM_TOKENS tokens of one sequence; all items of a step advance over KV tiles
together, as one bmm whose matrices have the same shape at every step. Rule: a tile that a row does
not see leaves its state as it is, and KV that no row of an item may see is selected away before it
is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.backends.base import Int32Array
from octavo.backends.torch.elementwise import exp, softcap, tree_sum
from octavo.program.ir import BLOCK_SIZE, KV, KV_SPLIT, KV_TILE

ITEM_TOKENS = 16
_BLOCKS_PER_TILE = KV_TILE // BLOCK_SIZE
_NEVER = -1  # the position of a padding row: it sees nothing


@dataclass(frozen=True, slots=True)
class Items:
    """A step's query tiles, for one layer group.

    tokens [I, 16]: rows of q (padding: 0). positions [I, 16] (padding: _NEVER).
    tables [I, max blocks, a multiple of a tile]: block ids. lengths [I]: KV positions there are.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def build(
        cls,
        cu_q: Int32Array,
        seq_lens: Int32Array,
        block_table: Int32Array,
        positions: Int32Array,
        window: int | None,
    ) -> Items:
        """Cut each sequence's new tokens into items."""
        pieces = [
            (s, start, min(start + ITEM_TOKENS, int(cu_q[s + 1])))
            for s in range(len(seq_lens))
            for start in range(int(cu_q[s]), int(cu_q[s + 1]), ITEM_TOKENS)
        ]
        tokens = np.zeros((len(pieces), ITEM_TOKENS), np.int64)
        at = np.full((len(pieces), ITEM_TOKENS), _NEVER, np.int64)
        for i, (_, start, stop) in enumerate(pieces):
            tokens[i, : stop - start] = np.arange(start, stop)
            at[i, : stop - start] = positions[start:stop]
        owners = np.array([s for s, _, _ in pieces], np.int64)
        tiles = -(-int(seq_lens.max()) // KV_TILE)
        tables = np.zeros((len(pieces), tiles * _BLOCKS_PER_TILE), np.int64)
        width = min(tables.shape[1], block_table.shape[1])
        tables[:, :width] = block_table[owners, :width]
        lengths = seq_lens[owners].astype(np.int64)
        starts = np.arange(tables.shape[1])[None, :] * BLOCK_SIZE
        used = starts < lengths[:, None]
        if window is not None:
            used &= starts + BLOCK_SIZE > at[:, :1] - window + 1
        tables[~used] = 0  # beyond a sequence's end, and before its window, a table holds anything
        return cls(*(torch.from_numpy(a) for a in (tokens, at, tables, lengths)))


@dataclass(slots=True)
class _Softmax:
    """Running maximum m, sum l [.., rows, 1] and output o [.., rows, D] of an online softmax."""

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  the literature's name
    o: torch.Tensor

    @classmethod
    def empty(cls, q: torch.Tensor) -> _Softmax:
        m = q.new_full((*q.shape[:-1], 1), -torch.inf)
        return cls(m, torch.zeros_like(m), torch.zeros_like(q))

    def add_tile(self, scores: torch.Tensor, v: torch.Tensor) -> None:
        m = torch.maximum(self.m, scores.amax(dim=-1, keepdim=True))
        factor = _exp_difference(self.m, m)
        p = _exp_difference(scores, m)
        self.l = self.l * factor + tree_sum(p)[..., None]
        self.o = self.o * factor + torch.bmm(p, v)
        self.m = m

    def merge(self, other: _Softmax) -> None:
        m = torch.maximum(self.m, other.m)
        a, b = _exp_difference(self.m, m), _exp_difference(other.m, m)
        self.l = self.l * a + other.l * b
        self.o = self.o * a + other.o * b
        self.m = m


def _sink(sinks: torch.Tensor, rows: torch.Tensor) -> _Softmax:
    """A score for each head [HK, G], without a value, beside rows [I * HK, 16 * G, D]."""
    num_items = rows.shape[0] // sinks.shape[0]
    m = sinks[None, :, None, :].expand(num_items, -1, ITEM_TOKENS, -1).reshape(*rows.shape[:2], 1)
    return _Softmax(m, torch.ones_like(m), torch.zeros_like(rows))


def _exp_difference(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """exp(x - m), with exp(-inf - -inf) = 0: nothing was seen yet."""
    return exp(torch.where(torch.isneginf(x), x, x - m))


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    items: Items,
    kv: KV,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H D] -> [T, H D]; caches [blocks, HK, D, 16] and [blocks, HK, 16, D]; sinks [H]."""
    num_items = items.tokens.shape[0]
    heads, dim = kv.kv_heads, kv.head_dim
    per_kv = q.shape[1] // (heads * dim)
    # [I, 16, HK, G, D] -> [I * HK, 16 * G, D]
    rows = (q * scale)[items.tokens].view(num_items, ITEM_TOKENS, heads, per_kv, dim)
    rows = rows.permute(0, 2, 1, 3, 4).reshape(num_items * heads, ITEM_TOKENS * per_kv, dim)
    total, split = _Softmax.empty(rows), _Softmax.empty(rows)
    poisoned = torch.zeros(num_items, ITEM_TOKENS, dtype=torch.bool)
    for start in range(0, items.tables.shape[1] * BLOCK_SIZE, KV_TILE):
        if start and start % KV_SPLIT == 0:
            total.merge(split)
            split = _Softmax.empty(rows)
        k, v, bad = _read_tile(k_cache, v_cache, items, start)
        visible = _visible(items, start, kv.window)
        poisoned |= (visible & bad[:, None, :]).any(dim=2)
        mask = visible[:, None, :, None, :].expand(-1, heads, -1, per_kv, -1)
        scores = torch.bmm(rows, k)
        if cap is not None:
            scores = softcap(scores, cap)
        split.add_tile(torch.where(mask.reshape(scores.shape), scores, -torch.inf), v)
    total.merge(split)
    if sinks is not None:
        total.merge(_sink(sinks.view(heads, per_kv), rows))
    result = (total.o / total.l).view(num_items, heads, ITEM_TOKENS, per_kv, dim)
    result = result.permute(0, 2, 1, 3, 4).reshape(num_items, ITEM_TOKENS, -1)
    result = torch.where(poisoned[:, :, None], torch.nan, result)
    out = torch.empty_like(q)
    real = items.positions != _NEVER
    out[items.tokens[real]] = result[real]
    return out


def _visible(items: Items, start: int, window: int | None) -> torch.Tensor:
    """[I, 16, KV_TILE]: which positions of a tile each row sees."""
    at = torch.arange(start, start + KV_TILE)
    visible = at <= items.positions[:, :, None]
    if window is not None:
        visible &= at > items.positions[:, :, None] - window
    return visible


def _read_tile(
    k_cache: torch.Tensor, v_cache: torch.Tensor, items: Items, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K [I * HK, D, 64] and V [I * HK, 64, D] in f32, with what is no number replaced by 0, and which
    positions [I, 64] held such."""
    first = start // BLOCK_SIZE
    blocks = items.tables[:, first : first + _BLOCKS_PER_TILE]
    num_items, heads, dim = blocks.shape[0], k_cache.shape[1], k_cache.shape[2]
    k = k_cache[blocks].float().permute(0, 2, 3, 1, 4).reshape(num_items, heads, dim, KV_TILE)
    v = v_cache[blocks].float().permute(0, 2, 1, 3, 4).reshape(num_items, heads, KV_TILE, dim)
    k_good, v_good = torch.isfinite(k), torch.isfinite(v)
    bad = ~(k_good.all(dim=2).all(dim=1) & v_good.all(dim=3).all(dim=1))
    written = torch.arange(start, start + KV_TILE) < items.lengths[:, None]
    k = torch.where(k_good & written[:, None, None, :], k, 0.0)
    v = torch.where(v_good & written[:, None, :, None], v, 0.0)
    return k.flatten(0, 1), v.flatten(0, 1), bad & written
