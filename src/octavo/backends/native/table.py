"""Which ops the CPU kernels serve, and what they need: packed weights and scratch memory.

Rule: sizes here are those of csrc/cpu (layouts.hpp, check.cpp), which refuses a program whose
scratch is too small. Nothing here needs the library or torch: a bill can be computed anywhere.
"""

from __future__ import annotations

from octavo.program.ir import (
    BLOCK_SIZE,
    KV,
    KV_SPLIT,
    KV_TILE,
    Add,
    AddRMSNorm,
    Attention,
    Embedding,
    GatedActivation,
    GatherRows,
    Linear,
    MoE,
    Op,
    QKNorm,
    RMSNorm,
    RotaryStoreKV,
    ScaleLogits,
    Weight,
)
from octavo.program.planner import ALIGNMENT, Kernel, Limits, Unserved
from octavo.quantization.formats import GROUP

PANEL = 16  # outputs of a weight panel
LANES = 8
QUERY_TILE = 16  # query tokens of an attention work item
SPLIT_ITEMS = 8  # items a thread, below which attention shares them a split at a time
EXPERT_TOKENS = 512  # whose experts are worked on together
_ROUTER_BITS = 16  # of a router's activations
_MOST_PADDED_ROWS = 4  # of the quantised rows of a product's last tile
_F32 = 4


class NativeKernelTable:
    """The kernels of liboctavo_cpu, for a team of `num_threads`."""

    name = "native"

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def choose(self, op: Op, limits: Limits) -> Kernel:
        """The kernel for an op, or raise Unserved with the reason."""
        match op:
            case Embedding():
                _require_lanes("rows", op.out.width)
                return Kernel(f"embedding_{op.weight.format}")
            case RMSNorm() | Add() | AddRMSNorm():
                _require_lanes("rows", op.out.width)
                return Kernel(op.kind)
            case QKNorm():
                _require_lanes("heads", op.head_dim)
                return Kernel("qk_norm")
            case Linear():
                quant_nbytes = _quant_nbytes(op.weight, op.activation_bits)
                name = f"linear_{op.weight.format}{'_a8' if quant_nbytes == 1 else ''}"
                return Kernel(name, self._linear_scratch(op, limits, quant_nbytes))
            case RotaryStoreKV():
                _require_lanes("heads", op.kv.head_dim)
                scratch = self._num_threads * _align(op.kv.head_dim * _F32)
                return Kernel(f"rotary_store_kv_{op.kv.dtype}", scratch)
            case Attention():
                _require_lanes("heads", op.kv.head_dim)
                return Kernel(f"attention_{op.kv.dtype}", self._attention_scratch(op.kv, op.q_heads, limits))
            case GatedActivation():
                _require_lanes("rows", op.out.width)
                return Kernel(f"gated_{op.activation}")
            case MoE():
                for rows in (op.down.shape[1], op.out.width):
                    if rows % PANEL:
                        raise Unserved(f"experts of {rows} rows are not a multiple of {PANEL}")
                return Kernel(f"moe_{op.gate_up.format}", self._moe_scratch(op, limits))
            case GatherRows() | ScaleLogits():
                return Kernel(op.kind)
            case _:  # a kind that only another backend knows
                raise Unserved("no kernel")

    def weight_nbytes(self, weight: Weight) -> int:
        """Bytes of a parameter in panels of 16 rows, the last padded; of a vector, padded to 16."""
        rows = -(-weight.shape[0] // PANEL) * PANEL
        if len(weight.shape) == 1:
            return rows * _F32
        width = weight.shape[1]
        if not weight.format.quantized:
            return rows * width * weight.format.element_nbytes
        return rows * (width // GROUP) * weight.format.group_nbytes

    def _linear_scratch(self, op: Linear, limits: Limits, quant_nbytes: int) -> int:
        """Quantised rows, their scales and sums."""
        if not op.weight.format.quantized:
            return 0
        rows, width = limits.of(op.x.rows) + _MOST_PADDED_ROWS, op.x.width
        per_group = _align(rows * (width // GROUP) * _F32)
        return _align(rows * width * quant_nbytes) + 2 * per_group

    def _moe_scratch(self, op: MoE, limits: Limits) -> int:
        """MoEScratch of kernels/moe.hpp, for a chunk of tokens and their experts."""
        chunk = min(EXPERT_TOKENS, limits.max_tokens)
        pairs, experts, width = chunk * op.top_k, op.num_experts, op.down.shape[1]
        groups = min(experts, pairs)
        elements = [chunk * -(-experts // PANEL) * PANEL, pairs, pairs, pairs, pairs, experts, 2, 3 * experts]
        elements += [2 * pairs, pairs * op.x.width, pairs * width, chunk * 2 * PANEL * self._num_threads]
        prepared = max(
            _prepared_nbytes(op.router, _ROUTER_BITS, chunk, 1),
            _prepared_nbytes(op.gate_up, op.activation_bits, pairs, groups),
            _prepared_nbytes(op.down, op.activation_bits, pairs, groups),
        )
        return sum(_align(count * _F32) for count in elements) + prepared

    def _attention_scratch(self, kv: KV, q_heads: int, limits: Limits) -> int:
        """Per thread: queries, partial and total results of an item's rows, and a KV tile as f32.
        For all: results of splits that threads reduce apart."""
        rows = QUERY_TILE * (q_heads // kv.kv_heads)
        floats = 3 * rows * kv.head_dim + 4 * rows + 2 * KV_TILE * kv.head_dim
        apart = 0
        if self._num_threads > 1:
            tokens = -(-SPLIT_ITEMS * self._num_threads // kv.kv_heads)
            apart = tokens * q_heads * -(-limits.max_blocks * BLOCK_SIZE // KV_SPLIT)
        return self._num_threads * _align(floats * _F32) + _align(apart * (kv.head_dim + 2) * _F32)


def _quant_nbytes(weight: Weight, activation_bits: int | None) -> int:
    """Bytes of a number of activations as a weight multiplies it."""
    return 1 if weight.format.is_4_bit and activation_bits == 8 else 2


def _prepared_nbytes(weight: Weight, activation_bits: int | None, rows: int, products: int) -> int:
    """Bytes of rows of activations as a weight multiplies them, in up to `products` products."""
    if not weight.format.quantized:
        return 0
    width = weight.shape[1]
    row = width * _quant_nbytes(weight, activation_bits) + 2 * (width // GROUP) * _F32
    return _align((rows + products * _MOST_PADDED_ROWS) * row) + products * 4 * ALIGNMENT


def _require_lanes(what: str, width: int) -> None:
    if width % LANES:
        raise Unserved(f"{what} of {width} elements are not a multiple of {LANES}")


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
