"""Norms, activations, and exp.

Rule: only operations that IEEE 754 rounds exactly (+ - * / sqrt, comparisons, conversions) and sums
in a fixed tree. torch's own exp, silu and sum give a row other bits when it is computed alone: the
tail of a vectorised loop takes another path.
"""

from __future__ import annotations

import math

import torch

_LOG2E = 1.44269504
_LN2_HIGH = 0.693145752
_LN2_LOW = 1.42860677e-6
#: Cephes' expf: e**r = 1 + r + r**2 * p(r), |r| <= ln 2 / 2.
_EXP_COEFFICIENTS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
#: Below this, exp is 0: the contract's cut, well inside float32's range.
EXP_MIN = -87.0
EXP_MAX = 87.0


def exp(x: torch.Tensor) -> torch.Tensor:
    """e**x for x <= 87, f32, within 1 ulp; 0 below -87 and for -inf. NaN stays NaN."""
    clamped = x.clamp(EXP_MIN, EXP_MAX)
    n = torch.round(clamped * _LOG2E)
    r = clamped - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = torch.full_like(r, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    p = (p * (r * r) + r) + 1.0
    bits = (n.nan_to_num().to(torch.int32) + 127) << 23
    return torch.where(x < EXP_MIN, torch.zeros_like(p), p * bits.view(torch.float32))


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halves, zero-padded to a power of two."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[n, K], [K] -> [n, K]."""
    mean = tree_sum(x * x) / x.shape[-1]
    r = torch.ones_like(mean) / torch.sqrt(mean + eps)
    return (x * r[:, None]) * weight


def tanh(x: torch.Tensor) -> torch.Tensor:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), negated where x < 0."""
    e = exp(-2.0 * x.abs())
    t = (1.0 - e) / (1.0 + e)
    return torch.where(x < 0, -t, t)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap)."""
    return tanh(x / torch.full_like(x, cap)) * cap


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x[:, :F]) * x[:, F:] of [n, 2 F]."""
    gated, up = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gated, up = gated.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1.0) * (gated / (1.0 + exp((gated * -1.702).clamp(max=EXP_MAX))))
    if activation == "silu":
        return gated / (1.0 + exp((-gated).clamp(max=EXP_MAX))) * up
    inner = (gated + gated * gated * gated * 0.044715) * math.sqrt(2 / math.pi)
    return gated * 0.5 * (1.0 + tanh(inner)) * up
