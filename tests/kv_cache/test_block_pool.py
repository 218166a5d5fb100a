"""The pool: every block in one state, the oldest cached one evicted first."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.block_pool import Block, BlockPool

PARENT = b"parent"


def register(pool: BlockPool, block: Block, name: int) -> None:
    """Register a block under a key made of `name`."""
    pool.register(block, (0, bytes([name])), PARENT, (name,))


def lookup(pool: BlockPool, name: int) -> Block | None:
    """Find what `register` registered."""
    return pool.lookup((0, bytes([name])), PARENT, (name,))


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for name, block in enumerate(blocks):
        register(pool, block, name)
    pool.dereference(reversed(blocks))
    assert (pool.num_available, pool.num_cached) == (4, 3)
    assert pool.allocate(1)[0] not in blocks
    assert pool.allocate(2) == [blocks[2], blocks[1]]
    assert [lookup(pool, name) for name in range(3)] == [blocks[0], None, None]
    pool.check_integrity()


def test_a_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    register(pool, first, 1)
    register(pool, second, 2)
    pool.dereference([first, second])
    pool.reference(first)
    assert pool.num_available == 1
    pool.dereference([first])
    assert pool.allocate(2) == [second, first]


def test_a_shared_block_stays_until_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.reference(block)
    pool.dereference([block])
    assert pool.num_available == 0
    pool.dereference([block])
    assert pool.num_available == 1


def test_a_key_finds_only_the_content_that_was_registered() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    key = (0, b"key")
    pool.register(first, key, PARENT, (1, 2))
    pool.register(second, key, PARENT, (3, 4))  # the same hash: who was first stays
    assert pool.lookup(key, PARENT, (1, 2)) is first
    assert pool.lookup(key, PARENT, (3, 4)) is None
    assert pool.lookup(key, b"another", (1, 2)) is None
    assert pool.lookup((1, b"key"), PARENT, (1, 2)) is None
    assert second.key is None
    pool.check_integrity()


def test_an_unregistered_block_is_free_as_soon_as_nobody_references_it() -> None:
    pool = BlockPool(2)
    held, cached = pool.allocate(2)
    register(pool, held, 1)
    register(pool, cached, 2)
    pool.dereference([cached])
    pool.unregister(held)
    pool.unregister(cached)
    pool.unregister(cached)
    assert (pool.num_cached, pool.num_available) == (0, 1)
    pool.dereference([held])
    assert (pool.num_cached, pool.num_available) == (0, 2)
    assert lookup(pool, 1) is lookup(pool, 2) is None
    pool.check_integrity()


def test_misuse_is_refused() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 available"):
        pool.allocate(2)
    (block,) = pool.allocate(1)
    register(pool, block, 1)
    with pytest.raises(AssertionError, match="registered already"):
        register(pool, block, 2)
    pool.dereference([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.dereference([block])


@pytest.mark.parametrize("damage", ["count", "free twice", "index", "key"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(3)
    held, cached, _ = pool.allocate(3)
    register(pool, held, 1)
    register(pool, cached, 2)
    pool.dereference([cached, pool.blocks[2]])
    pool.check_integrity()
    if damage == "count":
        held.ref_count = 0
    elif damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "index":
        pool._index[0, b"?"] = held
    else:
        cached.key = None
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a list of free blocks is not needed, the order of cached ones is."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references: dict[int, int] = {}
        self.names: dict[int, int] = {}  # block id -> name it is registered under
        self.cached: list[int] = []  # oldest first

    def num_free(self) -> int:
        return self.pool.num_blocks - len(self.references) - len(self.cached)

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        if count > self.num_free() + len(self.cached):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        evicted = self.cached[: max(0, count - self.num_free())]
        taken = [block.id for block in self.pool.allocate(count)]
        assert [i for i in taken if i in self.cached] == evicted
        assert not set(taken) & set(self.references)
        for i in taken:
            self.references[i] = 1
        for i in evicted:
            self.cached.remove(i)
            del self.names[i]

    @precondition(lambda self: self.references or self.cached)
    @rule(data=st.data())
    def reference(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([*self.references, *self.cached]))
        self.pool.reference(self.pool.blocks[i])
        self.references[i] = self.references.get(i, 0) + 1
        if i in self.cached:
            self.cached.remove(i)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def dereference(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(list(self.references)), unique=True))
        self.pool.dereference([self.pool.blocks[i] for i in ids])
        for i in ids:
            self.references[i] -= 1
            if not self.references[i]:
                del self.references[i]
                if i in self.names:
                    self.cached.append(i)

    @precondition(lambda self: set(self.references) - set(self.names))
    @rule(data=st.data(), name=st.integers(0, 3))
    def register(self, data: st.DataObject, name: int) -> None:
        i = data.draw(st.sampled_from(sorted(set(self.references) - set(self.names))))
        register(self.pool, self.pool.blocks[i], name)
        if name not in self.names.values():
            self.names[i] = name

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, self.pool.num_blocks - 1))
        self.pool.unregister(self.pool.blocks[i])
        self.names.pop(i, None)
        if i in self.cached:
            self.cached.remove(i)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_available == self.num_free() + len(self.cached)
        for block in self.pool.blocks:
            assert block.ref_count == self.references.get(block.id, 0)
        for name in range(4):
            found = lookup(self.pool, name)
            assert [i for i, n in self.names.items() if n == name] == ([] if found is None else [found.id])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
