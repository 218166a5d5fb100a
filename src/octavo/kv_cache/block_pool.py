"""The blocks of KV memory and who references them.

Every block is in exactly one state:

    free        holds nothing worth keeping
    referenced  by one or more requests (registered under its hash or not yet)
    cached      registered, referenced by nobody: evictable, least recently used first

    allocate: free -> referenced, else the oldest cached -> referenced (and forgotten)
    reference: cached or referenced -> referenced
    dereference: referenced -> cached if registered, else free

Rule: only this class changes a block's state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.kv_cache.block_hash import BlockHash
from octavo.observability.stats import BlockCounts

#: A group's block under its hash: two groups keep different KV for the same tokens.
CacheKey = tuple[int, BlockHash]


@dataclass(slots=True, eq=False)
class Block:
    """A page in each storage of the pool."""

    id: int
    ref_count: int = 0
    key: CacheKey | None = None
    parent: BlockHash = b""
    token_ids: tuple[int, ...] = ()


class BlockPool:
    """`num_blocks` equal blocks, and the index of those that are registered."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = list(reversed(self.blocks))
        self._cached: OrderedDict[int, Block] = OrderedDict()
        self._index: dict[CacheKey, Block] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self.blocks)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Registered blocks that nobody references."""
        return len(self._cached)

    def count(self) -> BlockCounts:
        """Blocks by state."""
        free, cached = len(self._free), len(self._cached)
        total = len(self.blocks)
        return BlockCounts(total=total, free=free, cached=cached, referenced=total - free - cached)

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks, evicting cached ones only when free ones run out."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                _, block = self._cached.popitem(last=False)
                self._forget(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def reference(self, block: Block) -> None:
        """Add a reference to a registered or referenced block."""
        if block.ref_count == 0:
            del self._cached[block.id]
        block.ref_count += 1

    def dereference(self, blocks: Iterable[Block]) -> None:
        """Drop a reference of each. The first is evicted first: pass a sequence tail first."""
        for block in blocks:
            assert block.ref_count > 0, f"block {block.id} is dereferenced once too often"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.key is None:
                    self._free.append(block)
                else:
                    self._cached[block.id] = block

    def register(self, block: Block, key: CacheKey, parent: BlockHash, token_ids: tuple[int, ...]) -> None:
        """Make a full block findable. Where its content is registered already, that one stays."""
        assert block.ref_count > 0, f"nobody computed block {block.id}"
        assert block.key is None, f"block {block.id} is registered already"
        if key not in self._index:
            block.key, block.parent, block.token_ids = key, parent, token_ids
            self._index[key] = block

    def unregister(self, block: Block) -> None:
        """Make a block unfindable, because its content can't be trusted."""
        if block.key is None:
            return
        self._forget(block)
        if block.ref_count == 0:
            del self._cached[block.id]
            self._free.append(block)

    def lookup(self, key: CacheKey, parent: BlockHash, token_ids: tuple[int, ...]) -> Block | None:
        """The block registered under `key`, if it really holds these tokens after that parent."""
        block = self._index.get(key)
        if block is not None and (block.parent != parent or block.token_ids != token_ids):
            return None
        return block

    def _forget(self, block: Block) -> None:
        assert block.key is not None
        del self._index[block.key]
        block.key, block.parent, block.token_ids = None, b"", ()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in exactly one state and the index is exact."""
        free = {block.id for block in self._free}
        assert len(free) == len(self._free), "a block is free twice"
        for block in self.blocks:
            cached = block.id in self._cached
            states = (block.id in free) + cached + (block.ref_count > 0)
            assert states == 1, f"block {block.id} is in {states} states"
            assert cached <= (block.key is not None), f"block {block.id} is cached but not registered"
            if block.key is not None:
                assert self._index.get(block.key) is block, f"block {block.id} is not found by its key"
                assert block.id not in free, f"block {block.id} is free but registered"
        registered = sum(block.key is not None for block in self.blocks)
        assert registered == len(self._index), "the index names blocks that don't know it"
