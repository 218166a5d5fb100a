"""The KV manager against a simple model, with several requests and steps in flight.

The model keeps prefixes as tuples of tokens instead of hashes, finds hits by trying every length, and
remembers of each reference given back until which step it is in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv_cache.manager import KVCacheManager
from octavo.program.ir import BLOCK_SIZE, KVGroup
from octavo.request import Request
from octavo.sampling_params import SamplingParams

FULL = KVGroup(None, (0,))
LAYOUTS = [(FULL,), (FULL, KVGroup(20, (1,))), (KVGroup(1, (0,)), KVGroup(40, (1,)))]
LENGTH = 70
#: Texts that part from each other after some blocks.
TEXTS = [[0] * LENGTH, [0] * 20 + [1] * (LENGTH - 20), [0] * 40 + [2] * (LENGTH - 40)]

lengths = st.one_of(st.integers(1, LENGTH), st.sampled_from([16, 32, 64]))

Content = tuple[int, str, tuple[int, ...]]  # group, salt, the whole prefix
Table = list[list[int | None]]


@dataclass(eq=False)
class Sequence:
    """A request that holds blocks, and its steps in flight as (step, end)."""

    request: Request
    steps: list[tuple[int, int]] = field(default_factory=list)
    hashed: int = 0  # leading blocks that the manager has named


class ManagerMachine(RuleBasedStateMachine):
    """Requests are admitted, computed, freed, undone and poisoned."""

    @initialize(groups=st.sampled_from(LAYOUTS), num_blocks=st.integers(5, 16))
    def start(self, groups: tuple[KVGroup, ...], num_blocks: int) -> None:
        self.kv = KVCacheManager(num_blocks, groups, step_tokens=LENGTH)
        self.groups = groups
        self.live: list[Sequence] = []
        self.registry: dict[Content, int] = {}
        self.given_back: list[tuple[int, int]] = []  # (last step that may use it, block id)
        self.step = 0
        self.retired = 0
        self.num_made = 0

    # -- the model ------------------------------------------------------------------------------

    def table(self, request: Request) -> Table:
        blocks = self.kv._tables[request.request_id].blocks
        return [[None if block is None else block.id for block in group] for group in blocks]

    def content(self, group: int, request: Request, index: int) -> Content:
        return group, request.cache_salt, tuple(request.prompt_ids[: (index + 1) * BLOCK_SIZE])

    def give_back(self, before: Table, after: Table) -> None:
        """References that a change dropped stay in use while steps are in flight."""
        for old, new in zip(before, after, strict=True):
            for i, block in enumerate(old):
                kept = i < len(new) and new[i] is not None
                if block is not None and not kept and self.step > self.retired:
                    self.given_back.append((self.step, block))

    def expected_hit(self, request: Request) -> int:
        """The longest usable prefix, by trying all."""
        for length in range((request.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, 0, -BLOCK_SIZE):
            needed = [
                self.content(g, request, position // BLOCK_SIZE)
                for g, group in enumerate(self.groups)
                for position in range(length)
                if group.window is None or position > length - group.window
            ]
            if all(content in self.registry for content in needed):
                return length
        return 0

    def unavailable(self) -> set[int]:
        held = {b for s in self.live for group in self.table(s.request) for b in group if b is not None}
        return held | {block for _, block in self.given_back}

    # -- moves ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 4)
    @rule(text=st.sampled_from(TEXTS), length=lengths, salt=st.sampled_from(["", "", "t"]))
    def admit(self, text: list[int], length: int, salt: str) -> None:
        self.num_made += 1
        request = Request(
            request_id=f"r{self.num_made}",
            prompt_ids=text[:length],
            params=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            priority=0,
            arrival=0.0,
            sequence=self.num_made,
            cache_salt=salt,
        )
        match = self.kv.match_prefix(request)
        assert match.num_tokens == self.expected_hit(request)
        for g, blocks in enumerate(match.blocks):
            for i, block in enumerate(blocks):
                if block is not None:
                    assert block.id == self.registry[self.content(g, request, i)]
        self.kv.admit(request, match)
        request.num_computed_tokens = request.num_scheduled_tokens = match.num_tokens
        self.live.append(Sequence(request, hashed=(length - 1) // BLOCK_SIZE))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 40))
    def launch(self, data: st.DataObject, count: int) -> None:
        self.launch_step(data.draw(st.sampled_from(self.live)), count)

    @rule(text=st.sampled_from(TEXTS), length=lengths)
    def complete(self, text: list[int], length: int) -> None:
        """A request comes, is computed and goes: what it leaves is cached."""
        self.admit(text, length, "")
        sequence = self.live[-1]
        self.launch_step(sequence, length)
        while sequence.steps:
            self.retire()
        self.free_sequence(sequence, poisoned=False)

    def launch_step(self, sequence: Sequence, count: int) -> None:
        request = sequence.request
        end = min(request.num_tokens, request.num_scheduled_tokens + count)
        if end == request.num_scheduled_tokens:
            return
        before = self.table(request)
        busy = self.unavailable()
        missing = self.kv.num_missing(request, end)
        assert missing == len(before) * max(0, -(-end // BLOCK_SIZE) - len(before[0]))
        grown = self.kv.grow(request, end)
        assert grown == (missing <= self.kv.pool.num_blocks - len(busy))
        after = self.table(request)
        if not grown:
            assert after == before
            return
        new = {b for old, table in zip(before, after, strict=True) for b in table[len(old) :]}
        assert len(new) == missing
        assert not new & busy
        self.registry = {c: block for c, block in self.registry.items() if block not in new}
        self.step += 1
        self.kv.launch(self.step)
        request.num_scheduled_tokens = end
        sequence.steps.append((self.step, end))

    @precondition(lambda self: self.step > self.retired)
    @rule()
    def retire(self) -> None:
        self.retired += 1
        for sequence in self.live:
            if sequence.steps and sequence.steps[0][0] == self.retired:
                self.commit(sequence, sequence.steps.pop(0)[1])
        self.kv.retire(self.retired)
        self.given_back = [(step, block) for step, block in self.given_back if step > self.retired]

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        request = sequence.request
        before = self.table(request)
        first, last = request.num_computed_tokens // BLOCK_SIZE, num_computed // BLOCK_SIZE
        self.retired -= 1  # the step is not over before its blocks are dealt with
        request.num_computed_tokens = num_computed
        self.kv.commit(request)
        after = self.table(request)
        self.give_back(before, after)
        self.retired += 1
        for i in range(first, last):
            for g, group in enumerate(before):
                block = group[i]
                assert block is not None
                if block not in self.registry.values():
                    self.registry.setdefault(self.content(g, request, i), block)
        sequence.hashed = max(sequence.hashed, last)
        for group, table in zip(self.groups, after, strict=True):
            for i, held in enumerate(table):
                seen = group.window is None or (i + 1) * BLOCK_SIZE > num_computed - group.window + 1
                assert (held is not None) == seen

    @precondition(lambda self: self.live)
    @rule(data=st.data(), poisoned=st.booleans())
    def free(self, data: st.DataObject, poisoned: bool) -> None:
        self.free_sequence(data.draw(st.sampled_from(self.live)), poisoned)

    def free_sequence(self, sequence: Sequence, poisoned: bool) -> None:
        self.live.remove(sequence)
        request = sequence.request
        before = self.table(request)
        self.kv.free(request)
        self.give_back(before, [[] for _ in before])
        if poisoned:
            self.kv.unregister(request)
            for i in range(sequence.hashed):
                for g in range(len(self.groups)):
                    self.registry.pop(self.content(g, request, i), None)
        self.kv.forget(request)

    @precondition(lambda self: self.step > self.retired)
    @rule()
    def undo(self) -> None:
        for sequence in self.live:
            request = sequence.request
            while sequence.steps:
                sequence.steps.pop()
                end = sequence.steps[-1][1] if sequence.steps else request.num_computed_tokens
                self.kv.shrink(request, end)
                request.num_scheduled_tokens = end
            assert self.kv.holds(request, request.num_scheduled_tokens)
        self.kv.retire(self.step)
        self.retired = self.step
        self.given_back.clear()

    # -- what holds -----------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.kv.check_integrity()
        busy = self.unavailable()
        assert self.kv.num_available == self.kv.pool.num_blocks - len(busy)
        held = {b for s in self.live for group in self.table(s.request) for b in group if b is not None}
        assert self.kv.num_retiring == len(busy - held)
        assert self.kv.pool.num_cached == len(set(self.registry.values()) - busy)
        for sequence in self.live:
            table = self.table(sequence.request)
            assert self.kv.num_held(sequence.request) == sum(b is not None for g in table for b in g)
            assert self.kv.block_ids(sequence.request) == [[b or 0 for b in group] for group in table]

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            while self.step > self.retired:
                self.retire()
            for sequence in self.live:
                self.kv.free(sequence.request)
            assert self.kv.num_available == self.kv.pool.num_blocks
            self.kv.check_integrity()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
