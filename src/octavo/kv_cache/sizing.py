"""The memory bill: every byte an engine will hold, before the first is allocated.

Rule: the bill is computed from the sealed program and the limits alone; what is allocated later is
allocated from these numbers.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from octavo.errors import InsufficientMemoryError
from octavo.kv_cache.groups import blocks_for
from octavo.program.planner import SealedProgram

GIB = 1 << 30
#: Left to Python, the tokenizer, sampling and the operating system's page cache.
RESERVE_NBYTES = 256 << 20
_DEFAULT_SHARE = 4  # KV takes at most one part in four of what is free, when nobody says how much
_DEFAULT_MOST = 4 * GIB


@dataclass(frozen=True, slots=True)
class MemoryBill:
    """Bytes by purpose. The reserve is not allocated."""

    weights: int
    arena: int
    step_inputs: int
    request_states: int
    kv: int
    num_blocks: int
    reserve: int = RESERVE_NBYTES

    @property
    def items(self) -> list[tuple[str, int]]:
        """Purposes and bytes, in the order in which they are allocated."""
        return [
            ("weights", self.weights),
            ("activation arena", self.arena),
            ("step inputs", self.step_inputs),
            ("request rows", self.request_states),
            (f"KV cache, {self.num_blocks} blocks", self.kv),
            ("reserve", self.reserve),
        ]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(nbytes for _, nbytes in self.items)

    def __str__(self) -> str:
        return ", ".join(f"{name} {nbytes / (1 << 20):.1f} MiB" for name, nbytes in self.items)


def make_bill(
    sealed: SealedProgram,
    *,
    step_inputs: int,
    request_states: int,
    kv_cache_gib: float,
    available: int,
) -> MemoryBill:
    """The bill of an engine, with as many KV blocks as `kv_cache_gib` holds (0: a share of what is free).

    available: bytes free on the device. InsufficientMemoryError where the bill does not fit, or where
    the blocks don't hold one sequence of full length.
    """
    fixed = MemoryBill(sealed.weights_nbytes, sealed.arena_nbytes, step_inputs, request_states, 0, 0)
    limits = sealed.limits
    one = blocks_of_sequence(sealed, limits.max_model_len)
    block = sealed.program.block_nbytes
    if kv_cache_gib:
        num_blocks = int(kv_cache_gib * GIB) // block
    else:
        share = min((available - fixed.total) // _DEFAULT_SHARE, _DEFAULT_MOST)
        num_blocks = min(max(share // block, one), one * limits.max_seqs)
    bill = MemoryBill(
        sealed.weights_nbytes,
        sealed.arena_nbytes,
        step_inputs,
        request_states,
        num_blocks * block,
        num_blocks,
    )
    if num_blocks < one:
        raise InsufficientMemoryError(
            f"{kv_cache_gib} GiB of KV cache hold {num_blocks} blocks, but one sequence of "
            f"{limits.max_model_len} tokens needs {one} ({one * block / GIB:.3f} GiB). Raise --kv-cache-gib "
            "or lower --max-model-len"
        )
    if bill.total > available:
        raise InsufficientMemoryError(
            f"the engine needs {bill.total / GIB:.2f} GiB, but {available / GIB:.2f} GiB are free: {bill}. "
            "Lower --kv-cache-gib, --max-model-len, --max-num-seqs or --max-num-batched-tokens"
        )
    return bill


def blocks_of_sequence(sealed: SealedProgram, num_tokens: int) -> int:
    """KV blocks that a sequence of this length holds at once."""
    return sum(blocks_for(group, num_tokens, sealed.limits.max_tokens) for group in sealed.program.kv_groups)


def longest_sequence(sealed: SealedProgram, num_blocks: int) -> int:
    """The longest sequence, up to the limit, that these blocks hold."""
    lengths = range(sealed.limits.max_model_len + 1)
    return bisect.bisect_right(lengths, num_blocks, key=lambda length: blocks_of_sequence(sealed, length)) - 1
