"""What a step costs, from the listing alone: floating-point operations and bytes of each op.

Rule: counts are of the algorithm, not of a kernel: each parameter is read once a step, each live KV
line once for each sequence that reads it, each activation once by each op. Backends are judged
against these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.program.ir import Attention, Dim, Embedding, Linear, MoE, Op, Program, RotaryStoreKV, Weight


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of one step.

    query_context: sum over tokens of the positions each sees. kv_tokens: sum over sequences of the
    positions read for it.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    query_context: int
    kv_tokens: int

    def of(self, dim: Dim) -> int:
        """The size of a dimension in this step."""
        return {Dim.TOKENS: self.num_tokens, Dim.SEQS: self.num_seqs, Dim.SAMPLED: self.num_sampled}[dim]


@dataclass(frozen=True, slots=True)
class OpCost:
    """Work of one op in one step."""

    op: Op
    flops: int
    weight_nbytes: int
    kv_nbytes: int
    activation_nbytes: int


def price(program: Program, shape: StepShape, weight_nbytes: Callable[[Weight], int]) -> list[OpCost]:
    """The cost of each op of a step of this shape."""
    return [_price_op(op, shape, weight_nbytes) for op in program.ops]


def _price_op(op: Op, shape: StepShape, weight_nbytes: Callable[[Weight], int]) -> OpCost:
    activations = sum(shape.of(b.rows) * b.width * b.dtype.nbytes for b in (*op.reads, *op.writes))
    elements = shape.of(op.out.rows) * op.out.width
    weights = sum(map(weight_nbytes, op.weights))
    flops, kv = elements, 0
    if isinstance(op, Linear):
        flops = 2 * elements * op.weight.shape[1]
    elif isinstance(op, MoE):  # every expert's weights are read where the step's tokens spread over all
        experts = min(op.num_experts, shape.num_tokens * op.top_k)
        hidden, width = op.x.width, op.down.shape[1]
        flops = 2 * shape.num_tokens * hidden * (op.num_experts + 3 * width * op.top_k)
        everywhere = sum(weight_nbytes(w) for w in (op.router, op.router_bias) if w is not None)
        weights = everywhere + (weights - everywhere) * experts // op.num_experts
    elif isinstance(op, Embedding):  # reads the rows of the step's tokens, not the table
        weights = weights * shape.num_tokens // op.weight.shape[0]
    elif isinstance(op, RotaryStoreKV):
        flops = 3 * shape.num_tokens * op.qkv.width
        kv = shape.num_tokens * 2 * op.kv.kv_heads * op.kv.head_dim * op.kv.dtype.nbytes
    elif isinstance(op, Attention):
        flops = 4 * shape.query_context * op.out.width
        kv = shape.kv_tokens * 2 * op.kv.kv_heads * op.kv.head_dim * op.kv.dtype.nbytes
    else:
        flops = 4 * elements
    return OpCost(op, flops, weights, kv, activations)
