"""Which KV a layer group needs: all of it, or what its window sees.

A token at position p of a window group with window W sees (p - W, p]. Rule: everything the rest of
kv_cache/ must know of windows is one of these three questions.
"""

from __future__ import annotations

from octavo.program.ir import BLOCK_SIZE, KVGroup


def first_needed_block(group: KVGroup, position: int) -> int:
    """The first block that a token at `position`, or a later one, can see."""
    if group.window is None:
        return 0
    return max(0, position - group.window + 1) // BLOCK_SIZE


def blocks_for(group: KVGroup, num_tokens: int, step_tokens: int) -> int:
    """The most blocks held at once while computing `num_tokens`, with up to `step_tokens` of them in
    steps that have not retired: a window group frees what slid out only when steps retire."""
    blocks = -(-num_tokens // BLOCK_SIZE)
    if group.window is None:
        return blocks
    return min(blocks, -(-(group.window + step_tokens) // BLOCK_SIZE) + 1)
