"""What a request's tables hold, and what others find of it."""

from __future__ import annotations

import pytest

from octavo.kv_cache import manager as manager_module
from octavo.kv_cache.manager import KVCacheManager, PrefixMatch
from octavo.program.ir import KVGroup
from octavo.request import Request
from octavo.sampling_params import SamplingParams

FULL = KVGroup(None, (0,))


def make(name: str, tokens: list[int], salt: str = "") -> Request:
    """A request with a prompt."""
    return Request(
        request_id=name,
        prompt_ids=tokens,
        params=SamplingParams(),
        max_tokens=100,
        stop_ids=frozenset(),
        priority=0,
        arrival=0.0,
        sequence=0,
        cache_salt=salt,
    )


class Steps:
    """A manager, and a scheduler's calls to it. Steps have one request each."""

    def __init__(self, num_blocks: int, *groups: KVGroup, prefix_caching: bool = True) -> None:
        self.kv = KVCacheManager(
            num_blocks, groups or (FULL,), prefix_caching=prefix_caching, step_tokens=128
        )
        self.step = 0

    def admit(self, request: Request) -> PrefixMatch:
        """Open a request's tables with what is cached."""
        match = self.kv.match_prefix(request)
        self.kv.admit(request, match)
        request.num_computed_tokens = request.num_scheduled_tokens = match.num_tokens
        return match

    def launch(self, request: Request, count: int) -> int:
        """A step that computes `count` tokens is in flight: its number."""
        request.num_scheduled_tokens += count
        assert self.kv.grow(request, request.num_scheduled_tokens)
        self.step += 1
        self.kv.launch(self.step)
        return self.step

    def retire(self, step: int, request: Request, num_computed: int) -> None:
        """A step is over."""
        request.num_computed_tokens = num_computed
        self.kv.commit(request)
        self.kv.retire(step)
        self.kv.check_integrity()

    def compute(self, request: Request, count: int | None = None) -> None:
        """One step from start to end: `count` tokens, or all that are left."""
        count = request.num_tokens - request.num_computed_tokens if count is None else count
        self.retire(self.launch(request, count), request, request.num_scheduled_tokens)

    def run(self, name: str, tokens: list[int], salt: str = "") -> None:
        """A request comes, is computed and goes."""
        request = make(name, tokens, salt)
        self.admit(request)
        self.compute(request)
        self.kv.free(request)
        self.kv.forget(request)
        self.kv.check_integrity()

    def hit(self, tokens: list[int], salt: str = "") -> int:
        """How many of these tokens are cached."""
        request = make("probe", tokens, salt)
        length = self.kv.match_prefix(request).num_tokens
        self.kv.forget(request)
        return length


# -- hits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48), (200, 48)]
)
def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(length: int, hit: int) -> None:
    steps = Steps(8)
    steps.run("a", list(range(60)))
    assert steps.hit(list(range(length))) == hit


def test_a_hit_ends_where_the_tokens_differ() -> None:
    steps = Steps(8)
    steps.run("a", list(range(64)))
    tokens = list(range(64))
    tokens[33] = 99
    assert steps.hit(tokens) == 32
    assert steps.hit([99, *range(1, 64)]) == 0


def test_a_hit_shares_blocks() -> None:
    steps = Steps(8)
    steps.run("a", list(range(40)))
    b, c = make("b", list(range(40))), make("c", list(range(33)))
    assert steps.kv.match_prefix(b).num_unreferenced == 2
    steps.admit(b)
    assert steps.kv.match_prefix(c).num_unreferenced == 0
    steps.admit(c)
    assert steps.kv.block_ids(b) == steps.kv.block_ids(c)
    assert steps.kv.num_available == 6
    assert (steps.kv.num_held(b), steps.kv.num_held(c)) == (2, 2)


def test_salts_keep_tenants_apart() -> None:
    steps = Steps(8)
    steps.run("a", list(range(40)), salt="one")
    assert steps.hit(list(range(40)), salt="two") == steps.hit(list(range(40))) == 0
    assert steps.hit(list(range(40)), salt="one") == 32


def test_output_is_found_as_the_prompt_of_another() -> None:
    steps = Steps(8)
    request = make("a", list(range(20)))
    steps.admit(request)
    steps.compute(request)
    request.output_ids = list(range(20, 40))
    steps.compute(request)
    steps.kv.free(request)
    assert steps.hit(list(range(64))) == 32


def test_without_prefix_caching_nothing_is_found_or_awaited() -> None:
    steps = Steps(8, prefix_caching=False)
    a, b = make("a", list(range(40))), make("b", list(range(40)))
    steps.admit(a)
    assert not steps.kv.awaits_another(b, steps.kv.match_prefix(b))
    steps.compute(a)
    steps.kv.free(a)
    assert steps.hit(list(range(40))) == 0
    assert steps.kv.pool.num_cached == 0


@pytest.mark.parametrize("window", [None, 20])
def test_a_collision_of_hashes_is_a_miss(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "block_hash", lambda parent, token_ids: b"the same")
    steps = Steps(16, KVGroup(window, (0,)))
    steps.run("a", list(range(40)))
    assert steps.hit([99, *range(1, 40)]) == 0
    steps.run("b", [99, *range(1, 40)])  # nothing of it can be registered
    assert steps.hit([99, *range(1, 40)]) == 0
    assert steps.hit(list(range(40))) == 16
    steps.kv.check_integrity()


# -- registration ---------------------------------------------------------------------------------


def test_a_block_is_found_only_when_its_step_retired() -> None:
    steps = Steps(8)
    request = make("a", list(range(48)))
    steps.admit(request)
    first, second = steps.launch(request, 20), steps.launch(request, 20)
    assert steps.hit(list(range(48))) == 0
    steps.retire(first, request, 20)
    assert steps.hit(list(range(48))) == 16
    steps.retire(second, request, 40)
    assert steps.hit(list(range(48))) == 32


def test_of_two_that_computed_the_same_the_first_stays_registered() -> None:
    steps = Steps(8)
    a, b = make("a", list(range(17))), make("b", list(range(17)))
    steps.admit(a)
    steps.admit(b)
    steps.compute(b)
    steps.compute(a)
    match = steps.kv.match_prefix(make("c", list(range(17))))
    assert match.blocks[0][0] is steps.kv._tables["b"].blocks[0][0]
    steps.kv.free(a)
    steps.kv.free(b)
    assert (steps.kv.pool.num_cached, steps.kv.num_available) == (1, 8)


def test_whoever_would_compute_the_same_block_awaits_it() -> None:
    steps = Steps(16)
    a, b, c = make("a", list(range(48))), make("b", list(range(40))), make("c", list(range(16)))
    steps.admit(a)

    def awaits(request: Request) -> bool:
        return steps.kv.awaits_another(request, steps.kv.match_prefix(request))

    assert awaits(b)
    assert not awaits(c)  # its only full block leaves nothing to compute, so it can't be hit
    steps.compute(a, 16)
    assert awaits(b)
    steps.compute(a, 16)
    assert not awaits(b)  # both blocks that it can use are there
    d = make("d", list(range(48)))
    assert not awaits(d)  # a's third block is not one that a hit may use: it is all of d
    steps.kv.free(a)
    assert not awaits(make("e", list(range(64))))


@pytest.mark.parametrize("groups", [(FULL,), (KVGroup(5, (0,)),)], ids=["full", "window"])
def test_what_is_poisoned_is_not_found(groups: tuple[KVGroup, ...]) -> None:
    steps = Steps(16, *groups)
    steps.run("before", list(range(100, 140)))
    request = make("a", list(range(40)))
    steps.admit(request)
    steps.compute(request)
    assert steps.hit(list(range(40))) == 32
    steps.kv.unregister(request)
    assert steps.hit(list(range(40))) == 0
    steps.kv.free(request)
    assert steps.hit(list(range(40))) == 0
    assert steps.hit(list(range(100, 140))) == 32
    assert steps.kv.num_available == 16
    steps.kv.check_integrity()


# -- giving back ----------------------------------------------------------------------------------


def test_the_tail_is_evicted_first() -> None:
    steps = Steps(5)
    steps.run("a", list(range(64)))
    steps.run("b", [99] * 20)  # takes the free block and a's last one
    assert steps.hit([*range(64), 0]) == 48
    steps.run("c", [98] * 60)  # takes b's second, which was never full, and what was used least recently
    assert steps.hit([*range(64), 0]) == 0
    assert steps.hit([99] * 20) == 16


def test_a_prefix_is_evicted_from_its_end() -> None:
    for num_evicted in range(5):
        steps = Steps(4)
        steps.run("a", list(range(64)))
        request = make("b", [99] * (16 * num_evicted))
        steps.admit(request)
        steps.launch(request, 16 * num_evicted)
        assert steps.hit([*range(64), 0]) == 64 - 16 * num_evicted


def test_whoever_was_used_last_is_evicted_last() -> None:
    steps = Steps(4)
    steps.run("a", [1] * 17)
    steps.run("b", [2] * 17)
    steps.run("a again", [1] * 17)
    steps.run("c", [3] * 40)
    assert (steps.hit([1] * 17), steps.hit([2] * 17)) == (16, 0)


def test_blocks_given_back_wait_for_the_steps_in_flight() -> None:
    steps = Steps(8)
    a, b = make("a", list(range(40))), make("b", [1] * 40)
    steps.admit(a)
    steps.admit(b)
    first = steps.launch(a, 40)
    second = steps.launch(b, 16)
    steps.kv.free(a)
    assert (steps.kv.num_available, steps.kv.num_retiring) == (4, 3)
    third = steps.launch(b, 16)
    steps.kv.retire(first)
    assert (steps.kv.num_available, steps.kv.num_retiring) == (3, 3)
    steps.retire(second, b, 16)
    assert (steps.kv.num_available, steps.kv.num_retiring) == (6, 0)
    steps.retire(third, b, 32)
    steps.kv.free(b)
    assert (steps.kv.num_available, steps.kv.num_retiring) == (8, 0)


def test_what_was_given_back_while_another_holds_it_will_not_become_available() -> None:
    steps = Steps(8)
    steps.run("before", list(range(40)))
    a, b, c = (make(name, list(range(40))) for name in "abc")
    for request in (a, b, c):
        steps.admit(request)
    step = steps.launch(a, 8)
    steps.kv.free(a)
    steps.kv.free(b)
    assert steps.kv.num_retiring == 1  # a's own third block
    steps.kv.free(c)
    assert steps.kv.num_retiring == 3
    steps.kv.retire(step)
    assert (steps.kv.num_available, steps.kv.num_retiring) == (8, 0)
    steps.kv.check_integrity()


def test_growing_takes_all_or_nothing() -> None:
    steps = Steps(5, FULL, KVGroup(64, (1,)))
    request = make("a", list(range(100)))
    steps.admit(request)
    assert steps.kv.num_missing(request, 48) == 6
    assert not steps.kv.grow(request, 48)
    assert (steps.kv.num_available, steps.kv.num_held(request)) == (5, 0)
    assert steps.kv.grow(request, 32)
    assert (steps.kv.num_available, steps.kv.num_held(request)) == (1, 4)
    assert steps.kv.grow(request, 20)
    assert steps.kv.holds(request, 32)
    assert not steps.kv.holds(request, 33)
    assert not steps.kv.holds(request, 16)


def test_shrinking_gives_back_what_an_undone_step_was_to_write() -> None:
    steps = Steps(8, FULL, KVGroup(64, (1,)))
    request = make("a", list(range(100)))
    steps.admit(request)
    steps.compute(request, 20)
    before = steps.kv.block_ids(request)
    step = steps.launch(request, 30)
    steps.kv.shrink(request, 20)
    steps.kv.retire(step)
    assert steps.kv.block_ids(request) == before
    assert steps.kv.num_available == 4
    steps.kv.check_integrity()


def test_the_loss_counts_what_only_this_request_holds() -> None:
    steps = Steps(16)
    a, b = make("a", list(range(60))), make("b", list(range(60)))
    steps.admit(a)
    steps.compute(a, 40)
    assert steps.kv.num_lost_tokens(a) == 40
    steps.admit(b)
    assert steps.kv.num_lost_tokens(a) == 8
    assert steps.kv.num_lost_tokens(b) == 0
    steps.compute(b, 20)
    assert steps.kv.num_lost_tokens(b) == 20


# -- windows --------------------------------------------------------------------------------------


def test_a_window_gives_back_what_slid_out_when_a_step_retired() -> None:
    steps = Steps(16, FULL, KVGroup(20, (1,)))
    request = make("a", list(range(200)))
    steps.admit(request)
    step = steps.launch(request, 60)
    assert steps.kv.num_held(request) == 8
    steps.retire(step, request, 60)  # position 60 sees (40, 60]: blocks 2 and 3
    assert [b is None for b in steps.kv._tables["a"].blocks[1]] == [True, True, False, False]
    assert steps.kv.num_held(request) == 6
    assert steps.kv.num_available == 10
    assert steps.kv.block_ids(request)[1][:2] == [0, 0]
    assert steps.kv.block_ids(request, 2)[1] == steps.kv.block_ids(request)[1][2:]


def test_a_window_keeps_what_steps_in_flight_may_read() -> None:
    steps = Steps(16, KVGroup(20, (0,)))
    request = make("a", list(range(200)))
    steps.admit(request)
    first, second = steps.launch(request, 60), steps.launch(request, 4)
    steps.retire(first, request, 60)
    assert (steps.kv.num_held(request), steps.kv.num_retiring) == (2, 2)
    assert steps.kv.num_available == 12
    steps.retire(second, request, 64)
    assert (steps.kv.num_held(request), steps.kv.num_retiring) == (2, 0)
    assert steps.kv.num_available == 14


def test_a_hit_needs_all_of_full_groups_and_of_windows_what_is_seen() -> None:
    steps = Steps(32, FULL, KVGroup(20, (1,)))
    steps.run("a", list(range(100)))
    request = make("b", list(range(100)))
    match = steps.kv.match_prefix(request)
    assert match.num_tokens == 96
    assert [b is None for b in match.blocks[0]] == [False] * 6
    assert [b is None for b in match.blocks[1]] == [True] * 4 + [False] * 2  # position 96 sees (76, 96]
    window_block = match.blocks[1][5]
    assert window_block is not None
    steps.kv.pool.unregister(window_block)  # as if evicted
    match = steps.kv.match_prefix(request)
    assert match.num_tokens == 80
    assert [b is None for b in match.blocks[1]] == [True] * 3 + [False] * 2
    full_block = match.blocks[0][1]
    assert full_block is not None
    steps.kv.pool.unregister(full_block)
    assert steps.kv.match_prefix(request).num_tokens == 16
    steps.admit(request)
    steps.compute(request)
    assert steps.kv.match_prefix(make("c", list(range(100)))).num_tokens == 96


def test_windows_alone_need_only_the_end_of_a_prefix() -> None:
    steps = Steps(10, KVGroup(20, (0,)))
    request = make("a", list(range(100)))
    steps.admit(request)
    for _ in range(5):
        steps.compute(request, 20)
    steps.kv.free(request)
    tokens = list(range(100))
    assert steps.hit(tokens) == 96
    for block in steps.kv.pool.blocks:  # as if all that slid out was evicted
        if block.token_ids and block.token_ids[0] < 64:
            steps.kv.pool.unregister(block)
    assert [b is None for b in steps.kv.match_prefix(make("b", tokens)).blocks[0]] == [True] * 4 + [False] * 2
    assert steps.hit(tokens[:90]) == 0


def test_bookkeeping_ends_with_the_request() -> None:
    steps = Steps(8)
    steps.run("a", list(range(40)))
    kv = steps.kv
    assert not kv._tables
    assert not kv._hash_chains
    assert not kv._computing
    assert not kv._retiring
