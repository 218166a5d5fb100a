"""Which blocks each request holds.

A request's block table, per layer group, with num_computed at 37 and a window of 16:

    index      0        1         2          3
    full     [ b7 ]   [ b9 ]   [ b2 .. ]               [0, 37) computed, block 2 partly filled
    window   [ -- ]   [ b4 ]   [ b5 .. ]               block 0 slid out and was given back

Intervals are half-open. Rule: this class is the only writer of block tables and the only caller of
BlockPool. A block is registered only when the step that wrote it has retired (`commit`), and a
block given back while steps are in flight becomes available only when those have retired.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.kv_cache.block_hash import BlockHash, block_hash, root_hash
from octavo.kv_cache.block_pool import Block, BlockPool
from octavo.kv_cache.groups import blocks_for, first_needed_block
from octavo.program.ir import BLOCK_SIZE, KVGroup
from octavo.request import Request


@dataclass(slots=True)
class _Table:
    """One request's blocks."""

    blocks: list[list[Block | None]]  # per group; None: slid out, or never needed
    first_held: list[int]  # per group: how many leading entries are None
    num_committed: int = 0  # leading full blocks that commit() has dealt with


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Blocks found for a request's first `num_tokens` tokens, per group. Valid until the next
    allocation; `KVCacheManager.admit` makes it stay."""

    num_tokens: int
    blocks: list[list[Block | None]]

    @property
    def num_unreferenced(self) -> int:
        """Found blocks that nobody references: taking them uses up available blocks."""
        return sum(b is not None and b.ref_count == 0 for group in self.blocks for b in group)


class KVCacheManager:
    """Block tables of all requests over one pool.

    step_tokens: the most tokens that steps in flight may hold together; it sizes window groups.
    """

    block_size = BLOCK_SIZE

    def __init__(
        self, num_blocks: int, groups: Sequence[KVGroup], *, prefix_caching: bool = True, step_tokens: int
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.groups = tuple(groups)
        self._prefix_caching = prefix_caching
        self._step_tokens = step_tokens
        self._tables: dict[str, _Table] = {}
        self._hash_chains: dict[str, list[BlockHash]] = {}
        #: Hashes of blocks that a running request is about to compute -> that request.
        self._computing: dict[BlockHash, str] = {}
        #: (last step that may read them, blocks): given back, not yet available.
        self._retiring: deque[tuple[int, list[Block]]] = deque()
        self._launched_step = 0
        self._retired_step = 0

    # -- questions ----------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.pool.num_available

    @property
    def num_retiring(self) -> int:
        """Blocks that become available when the steps in flight retire."""
        uses = Counter(block.id for _, blocks in self._retiring for block in blocks)
        return sum(self.pool.blocks[i].ref_count == count for i, count in uses.items())

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a sequence of this length holds at once."""
        return sum(blocks_for(group, num_tokens, self._step_tokens) for group in self.groups)

    def num_held(self, request: Request) -> int:
        """Blocks in a request's tables."""
        table = self._tables.get(request.request_id)
        return 0 if table is None else sum(map(len, table.blocks)) - sum(table.first_held)

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether a request's tables reach to `num_tokens`, and no further."""
        count = -(-num_tokens // BLOCK_SIZE)
        return all(len(group) == count for group in self._tables[request.request_id].blocks)

    def num_lost_tokens(self, request: Request) -> int:
        """Computed tokens that only this request's blocks hold: what preempting it puts at risk."""
        table = self._tables[request.request_id]
        shared = 0
        for block in table.blocks[0]:
            if block is not None and block.ref_count == 1:
                break
            shared += 1
        return max(0, request.num_computed_tokens - shared * BLOCK_SIZE)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that growing a request to `num_tokens` tokens would allocate."""
        count = -(-num_tokens // BLOCK_SIZE)
        missing = 0
        for group in self._tables[request.request_id].blocks:
            missing += max(0, count - len(group))
        return missing

    def match_prefix(self, request: Request) -> PrefixMatch:
        """The longest cached prefix, in whole blocks, that leaves every position to compute whose logits
        are wanted: at least the last."""
        limit = request.first_wanted_logits // BLOCK_SIZE
        empty: list[list[Block | None]] = [[] for _ in self.groups]
        if not self._prefix_caching or limit == 0:
            return PrefixMatch(0, empty)
        hashes = self._hashes(request, limit)
        full = [g for g, group in enumerate(self.groups) if group.window is None]
        length = limit
        for g in full:
            length = next((i for i in range(length) if self._find(g, request, hashes, i) is None), length)
        windows = [g for g in range(len(self.groups)) if g not in full]
        while length and not all(self._window_holds(g, request, hashes, length) for g in windows):
            length -= 1
        position = length * BLOCK_SIZE
        found = [
            [
                self._find(g, request, hashes, i) if i >= first_needed_block(group, position) else None
                for i in range(length)
            ]
            for g, group in enumerate(self.groups)
        ]
        return PrefixMatch(position, found)

    def awaits_another(self, request: Request, match: PrefixMatch) -> bool:
        """Whether a running request is computing the very block this one would compute next."""
        index = match.num_tokens // BLOCK_SIZE
        if not self._prefix_caching or index >= request.first_wanted_logits // BLOCK_SIZE:
            return False
        owner = self._computing.get(self._hashes(request, index + 1)[index])
        return owner is not None and owner != request.request_id

    def block_ids(self, request: Request, first: int = 0) -> list[list[int]]:
        """A request's block tables from index `first` on; 0 stands for blocks that no token sees any
        more."""
        table = self._tables[request.request_id]
        return [[0 if b is None else b.id for b in group[first:]] for group in table.blocks]

    def sizes(self) -> dict[str, int]:
        """Entries of internal containers: all 0 when idle."""
        return {"block_tables": len(self._tables), "hash_chains": len(self._hash_chains)}

    # -- changes ------------------------------------------------------------------------------

    def admit(self, request: Request, match: PrefixMatch) -> None:
        """Open a request's tables with the blocks of a match, referenced."""
        assert request.request_id not in self._tables
        for group in match.blocks:
            for block in group:
                if block is not None:
                    self.pool.reference(block)
        start = match.num_tokens // BLOCK_SIZE
        table = _Table(
            [list(group) for group in match.blocks],
            [min(first_needed_block(group, match.num_tokens), start) for group in self.groups],
            num_committed=start,
        )
        self._tables[request.request_id] = table
        if self._prefix_caching:
            full = (request.num_tokens - 1) // BLOCK_SIZE
            for digest in self._hashes(request, full)[start:full]:
                self._computing.setdefault(digest, request.request_id)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Hold blocks for tokens [0, num_tokens); False, and no change, if too few are available."""
        if self.num_missing(request, num_tokens) > self.num_available:
            return False
        count = -(-num_tokens // BLOCK_SIZE)
        for group in self._tables[request.request_id].blocks:
            group.extend(self.pool.allocate(max(0, count - len(group))))
        return True

    def shrink(self, request: Request, num_tokens: int) -> None:
        """Give back the blocks beyond [0, num_tokens): the step that was to write them was undone."""
        count = -(-num_tokens // BLOCK_SIZE)
        for group in self._tables[request.request_id].blocks:
            self._give_back([b for b in reversed(group[count:]) if b is not None])
            del group[count:]

    def commit(self, request: Request) -> None:
        """After steps retired: register the blocks that are full now, give back what slid out."""
        table = self._tables[request.request_id]
        full = request.num_computed_tokens // BLOCK_SIZE
        if self._prefix_caching and full > table.num_committed:
            hashes = self._hashes(request, full)
            for i in range(table.num_committed, full):
                parent, tokens = self._content(request, hashes, i)
                for g, group in enumerate(table.blocks):
                    block = group[i]
                    if block is not None and block.key is None:
                        self.pool.register(block, (g, hashes[i]), parent, tokens)
                self._stop_computing(hashes[i], request)
            table.num_committed = full
        for g, group in enumerate(table.blocks):
            first = table.first_held[g]
            gone = min(first_needed_block(self.groups[g], request.num_computed_tokens), len(group))
            if gone > first:
                self._give_back([b for b in group[first:gone] if b is not None])
                group[first:gone] = [None] * (gone - first)
                table.first_held[g] = gone

    def free(self, request: Request) -> None:
        """Give back all of a request's blocks, tail first."""
        table = self._tables.pop(request.request_id)
        for digest in self._hash_chains.get(request.request_id, []):
            self._stop_computing(digest, request)
        self._give_back([b for group in table.blocks for b in reversed(group) if b is not None])

    def unregister(self, request: Request) -> None:
        """Make what a request computed unfindable, whether it still holds the blocks or not: it can't
        be trusted."""
        hashes = self._hash_chains.get(request.request_id, [])
        for i in range(len(hashes)):
            for g in range(len(self.groups)):
                block = self._find(g, request, hashes, i)
                if block is not None:
                    self.pool.unregister(block)

    def forget(self, request: Request) -> None:
        """Drop what is remembered of a request that will not come back, or not as it was."""
        self._hash_chains.pop(request.request_id, None)

    def launch(self, step: int) -> None:
        """A step that uses the tables as they are is in flight from now on. Blocks given back before
        are not its business."""
        self._launched_step = step

    def retire(self, step: int) -> None:
        """No step up to this one is in flight any more: it retired or was undone. Blocks given back
        while it was the last in flight become available."""
        self._retired_step = step
        while self._retiring and self._retiring[0][0] <= step:
            self.pool.dereference(self._retiring.popleft()[1])

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts equal the tables' and retiring blocks' uses."""
        self.pool.check_integrity()
        for name, table in self._tables.items():
            for group, first in zip(table.blocks, table.first_held, strict=True):
                given_back = [block is None for block in group]
                assert given_back == [i < first for i in range(len(group))], f"{name} has a hole"
        uses: dict[int, int] = {}
        tables = [group for table in self._tables.values() for group in table.blocks]
        retiring: list[list[Block | None]] = [[*blocks] for _, blocks in self._retiring]
        for group in [*tables, *retiring]:
            for block in group:
                if block is not None:
                    uses[block.id] = uses.get(block.id, 0) + 1
        for block in self.pool.blocks:
            used = uses.get(block.id, 0)
            assert block.ref_count == used, f"block {block.id}: {block.ref_count} references, {used} uses"
        for owner in self._computing.values():
            assert owner in self._tables, f"{owner} is said to be computing blocks but holds none"

    # -- parts --------------------------------------------------------------------------------

    def _give_back(self, blocks: list[Block]) -> None:
        if self._launched_step > self._retired_step:
            self._retiring.append((self._launched_step, blocks))
        else:
            self.pool.dereference(blocks)

    def _stop_computing(self, digest: BlockHash, request: Request) -> None:
        if self._computing.get(digest) == request.request_id:
            del self._computing[digest]

    def _hashes(self, request: Request, count: int) -> list[BlockHash]:
        """Hashes of a request's first `count` full blocks (its list may hold more)."""
        chain = self._hash_chains.setdefault(request.request_id, [])
        while len(chain) < count:
            start = len(chain) * BLOCK_SIZE
            parent = chain[-1] if chain else _root(request)
            chain.append(block_hash(parent, request.token_ids(start, start + BLOCK_SIZE)))
        return chain

    def _content(
        self, request: Request, hashes: list[BlockHash], index: int
    ) -> tuple[BlockHash, tuple[int, ...]]:
        parent = hashes[index - 1] if index else _root(request)
        return parent, tuple(request.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE))

    def _find(self, group: int, request: Request, hashes: list[BlockHash], index: int) -> Block | None:
        return self.pool.lookup((group, hashes[index]), *self._content(request, hashes, index))

    def _window_holds(self, group: int, request: Request, hashes: list[BlockHash], length: int) -> bool:
        first = first_needed_block(self.groups[group], length * BLOCK_SIZE)
        return all(self._find(group, request, hashes, i) is not None for i in range(first, length))


def _root(request: Request) -> BlockHash:
    return root_hash(salt=request.cache_salt, long_rope=request.long_rope)
