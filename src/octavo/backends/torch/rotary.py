"""Rotary embedding and the KV store.

Rule: rotation is elementwise, products rounded before their sum; KV is rounded once, to the cache's
dtype, on its way into its page.
"""

from __future__ import annotations

import torch

from octavo.program.ir import BLOCK_SIZE, KV, DType

#: torch's names of what a cache may hold.
KV_DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos_sin [T, rotary_dim] -> [T, heads, D]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], dim=-1)


def kv_views(pages: torch.Tensor, kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
    """K [blocks, HK, D, 16] and V [blocks, HK, 16, D] of one storage, uint8 [blocks, page_nbytes]."""
    both = pages.view(KV_DTYPES[kv.dtype]).view(pages.shape[0], 2, -1)
    k = both[:, 0].view(-1, kv.kv_heads, kv.head_dim, BLOCK_SIZE)
    v = both[:, 1].view(-1, kv.kv_heads, BLOCK_SIZE, kv.head_dim)
    return k, v


def rotary_store_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    q_heads: int,
) -> torch.Tensor:
    """qkv [T, (H + 2 HK) D] -> q [T, H D]; k and v go to `slots` [T] of the caches."""
    k_cache, v_cache = caches
    kv_heads, dim = k_cache.shape[1], k_cache.shape[2]
    heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, dim)
    q = rotate(heads[:, :q_heads], cos_sin)
    k = rotate(heads[:, q_heads : q_heads + kv_heads], cos_sin)
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    k_cache[blocks, :, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets, :] = heads[:, q_heads + kv_heads :].to(v_cache.dtype)
    return q.reshape(qkv.shape[0], -1)
