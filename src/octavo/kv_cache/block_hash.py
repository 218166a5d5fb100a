"""Names for the content of full blocks.

A block's hash covers its tokens and, through its parent's hash, everything before them; the root
covers what else decides KV (a tenant's salt, the variant of the rope). Rule: a hash only nominates a
block. Whoever uses it compares the block's tokens too (`BlockPool.lookup`), so its own collision costs
a miss, never a wrong answer. Those before it are trusted to the parent's hash, which is why it has 256
bits: prompts come from strangers, and 128 would fall to 2**64 tries.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes

_DIGEST_SIZE = 32


def root_hash(*, salt: str = "", long_rope: bool = False) -> BlockHash:
    """The parent of a sequence's first block. Extra keys are tagged, so none can pose as another."""
    rope = b"long rope\0" if long_rope else b""
    return hashlib.blake2b(rope + b"salt\0" + salt.encode(), digest_size=_DIGEST_SIZE).digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a block whose predecessor hashes to `parent`."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_SIZE).digest()
