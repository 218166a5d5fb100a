"""Mixtures of experts whose rows don't know each other.

Rule: a token's experts are computed like any linear layer, in padded tiles, and their results are added in
the order of the token's own ranking, so who else went to an expert changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.backends.torch.elementwise import exp, gate, tree_sum
from octavo.backends.torch.linear import linear
from octavo.program.ir import MoE


def route(logits: torch.Tensor, op: MoE) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] -> shares and experts of each token, [T, top_k], best first."""
    weights = exp(logits - logits.amax(dim=1, keepdim=True))
    shares = weights / tree_sum(weights)[:, None]
    ranked, experts = torch.sort(shares, dim=1, descending=True, stable=True)
    ranked, experts = ranked[:, : op.top_k], experts[:, : op.top_k]
    if op.normalize:
        total = ranked[:, 0]
        for rank in range(1, op.top_k):
            total = total + ranked[:, rank]
        ranked = ranked / total[:, None]
    return ranked, experts


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix [N, K] and a bias [N], which may be missing."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, K] -> [n, N]."""
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        linear(x, self.weight, out, 0)
        return out if self.bias is None else out + self.bias

    def split(self, count: int) -> list[Affine]:
        """`count` equal parts, by rows."""
        biases = [None] * count if self.bias is None else self.bias.chunk(count)
        return [Affine(*part) for part in zip(self.weight.chunk(count), biases, strict=True)]


def moe(x: torch.Tensor, router: Affine, gate_up: Affine, down: Affine, op: MoE) -> torch.Tensor:
    """x [T, H], router [E, H], gate_up [E 2 F, H], down [E H, F] -> [T, H]."""
    shares, experts = route(router(x), op)
    results = x.new_empty(x.shape[0], op.top_k, x.shape[1])
    parts = zip(gate_up.split(op.num_experts), down.split(op.num_experts), strict=True)
    for expert, (wide, narrow) in enumerate(parts):
        tokens, ranks = torch.nonzero(experts == expert, as_tuple=True)
        if len(tokens):
            results[tokens, ranks] = narrow(gate(wide(x[tokens]), op.activation))
    total = shares[:, :1] * results[:, 0]
    for rank in range(1, op.top_k):
        total = total + shares[:, rank : rank + 1] * results[:, rank]
    return total
