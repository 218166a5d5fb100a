"""Mixtures of experts whose rows don't know each other.

Rule: a token's experts are computed like any linear layer, in padded tiles, and their results are added in
the order of the token's own ranking, so who else went to an expert changes nothing.
"""

from __future__ import annotations

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


def moe(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, op: MoE
) -> torch.Tensor:
    """x [T, H], router [E, H], gate_up [E 2 F, H], down [E H, F] -> [T, H]."""
    num_tokens, hidden = x.shape
    logits = x.new_empty(num_tokens, op.num_experts)
    linear(x, router, logits, 0)
    shares, experts = route(logits, op)
    results = x.new_empty(num_tokens, op.top_k, hidden)
    for expert, (wide, narrow) in enumerate(
        zip(gate_up.chunk(op.num_experts), down.chunk(op.num_experts), strict=True)
    ):
        tokens, ranks = torch.nonzero(experts == expert, as_tuple=True)
        if len(tokens):
            inner, out = x.new_empty(len(tokens), wide.shape[0]), x.new_empty(len(tokens), hidden)
            linear(x[tokens], wide, inner, 0)
            linear(gate(inner, op.activation), narrow, out, 0)
            results[tokens, ranks] = out
    total = shares[:, :1] * results[:, 0]
    for rank in range(1, op.top_k):
        total = total + shares[:, rank : rank + 1] * results[:, rank]
    return total
