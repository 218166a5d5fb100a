"""Linear layers whose rows don't know each other.

Rule: every matrix product has the same number of rows, ROWS, padded with zeros: torch picks its
kernel by shape, and the same kernel gives a row the same bits wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.quantization.formats import GROUP, Format

#: Rows of every matrix product. Few enough that decoding one token does not cost a prefill.
ROWS = 16
#: Weights of 16 bits are widened this many at a time (64 MiB as f32), or a row.
_WIDENED = 1 << 24


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integers q int8 [N, K]; scales d f32 [N, K / 32], or [N, K / 16]; mins m like d, or None. Views
    into the weights' memory. Where the contract says q - 8, that is what q holds."""

    format: Format
    q: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor | None


def linear(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight, out: torch.Tensor, top: int) -> None:
    """out[n, N] = x[n, K] W^T, in tiles of ROWS rows. top: the largest integer of a quantised x."""
    if not isinstance(weight, QuantizedWeight) and weight.dtype != torch.float32:
        count = max(1, _WIDENED // weight.shape[1])
        for first in range(0, weight.shape[0], count):
            linear(x, weight[first : first + count].float(), out[:, first : first + count], top)
        return
    for start in range(0, x.shape[0], ROWS):
        tile = x[start : start + ROWS]
        count = tile.shape[0]
        if count < ROWS:
            tile = torch.cat([tile, tile.new_zeros(ROWS - count, tile.shape[1])])
        if isinstance(weight, QuantizedWeight):
            product = _quantized_tile(tile, weight, float(top))
        else:
            product = torch.mm(tile, weight.t())
        out[start : start + count] = product[:count]


def _quantized_tile(x: torch.Tensor, weight: QuantizedWeight, top: float) -> torch.Tensor:
    """The contract's quantised arithmetic. Integer sums of a group stay below 2**24, so f32 products
    hold them exactly in any order."""
    rows, k = x.shape
    groups = k // GROUP
    x = x.view(rows, groups, GROUP)
    peak = x.abs().amax(dim=2)
    inverse = torch.full_like(peak, top) / peak  # a scalar over a tensor would round twice
    as_zeros = torch.isinf(inverse)
    inverse = torch.where(as_zeros, 0.0, inverse)
    scale = torch.where(as_zeros, 0.0, peak / top)
    ints = torch.round(x * inverse[:, :, None])
    sums = scale * ints.sum(dim=2)  # exact: integers
    parts = weight.d.shape[1]  # a group, or half of one
    ints, scale = ints.view(rows, parts, -1), scale.repeat_interleave(parts // groups, dim=1)
    dots = torch.bmm(ints.transpose(0, 1), weight.q.view(len(weight.q), parts, -1).permute(1, 2, 0).float())
    acc = x.new_zeros(rows, weight.q.shape[0])
    for g in range(parts):
        acc = _fma(dots[g], weight.d[:, g] * scale[:, g, None], acc)
        if weight.m is not None:
            acc = _fma(weight.m[:, g].expand_as(acc), sums[:, g, None].expand_as(acc), acc)
    return acc


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of f32, rounded once.

    In float64 the product is exact and the sum is not; rounding it to f32 again could round twice. So
    the sum is rounded to odd (Boldo and Melquiond, "When double rounding is odd"): where Knuth's TwoSum
    finds an error, the last bit is set, which keeps the second rounding from seeing a tie.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = torch.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)  # the true sum is larger in magnitude than its rounding
    odd = torch.where(inexact, bits + torch.where(away, 1, -1), bits)
    return odd.view(torch.float64).float()
