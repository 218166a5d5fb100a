"""Single stories that the scheduler must tell right."""

from __future__ import annotations

from typing import Any

import pytest
from test_scheduler_soak import EOS, FULL, Driver, Setup

from fakes import ScriptedExecutor, solo_run
from octavo.errors import InvalidRequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineRequest, ModelRunnerOutput, SampledToken, SchedulerOutput
from octavo.program.ir import KVGroup
from octavo.request import FinishReason, Request, RequestStatus
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policy import Policy
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits


def make_scheduler(
    num_blocks: int, *, budget: int = 64, max_seqs: int = 8, policy: Policy = Policy.FCFS, **kv: Any
) -> Scheduler:
    """A scheduler over one full group, or `groups`."""
    groups = kv.pop("groups", (FULL,))
    manager = KVCacheManager(num_blocks, groups, step_tokens=2 * budget, **kv)
    return Scheduler(SchedulerLimits(budget, max_seqs), manager, policy=policy)


def message(name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> EngineRequest:
    """A request that samples with seed 0."""
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    return EngineRequest(request_id=name, prompt_ids=prompt, params=params, **more)


def answer(plan: SchedulerOutput | None, token_id: int = 7) -> ModelRunnerOutput:
    """A result in which every row samples `token_id`."""
    assert plan is not None
    sampled = [
        SampledToken(request_id=row.request_id, position=row.start + row.num_tokens, token_id=token_id)
        for row in plan.rows
        if row.samples
    ]
    return ModelRunnerOutput(step=plan.step, sampled=sampled)


def ids(plan: SchedulerOutput | None) -> list[str]:
    """Whose rows a plan has."""
    assert plan is not None
    return [row.request_id for row in plan.rows]


def get(scheduler: Scheduler, name: str) -> Request:
    """An unfinished request."""
    request = scheduler.request(name)
    assert request is not None
    return request


# -- idle, and at the door ------------------------------------------------------------------------


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = make_scheduler(4)
    assert not scheduler.has_requests
    assert scheduler.schedule() is None
    scheduler.add(message("a", [1, 2], max_tokens=1))
    assert scheduler.has_requests
    plan = scheduler.schedule()
    assert scheduler.has_requests
    assert scheduler.schedule() is None  # its only token is being sampled
    assert scheduler.num_in_flight == 1
    (output,) = scheduler.update(answer(plan))
    assert (output.new_token_ids, output.finish_reason) == ([7], FinishReason.LENGTH)
    assert not scheduler.has_requests
    assert scheduler.request("a") is None
    assert scheduler.schedule() is None
    assert scheduler.num_in_flight == 0


def test_what_can_never_fit_is_refused_by_its_numbers() -> None:
    scheduler = make_scheduler(3)
    with pytest.raises(
        InvalidRequestError, match=r"prompt \(40\) and max_tokens \(9\) need 4 .* are 3"
    ) as error:
        scheduler.add(message("a", [1] * 40, max_tokens=9))
    assert error.value.param == "max_tokens"
    assert not scheduler.has_requests
    scheduler.add(message("a", [1] * 40, max_tokens=8))
    assert scheduler.has_requests


def test_a_window_needs_no_more_blocks_than_it_sees() -> None:
    groups = (KVGroup(20, (0,)),)
    needed = KVCacheManager(1, groups, step_tokens=8).blocks_for(1_000)
    scheduler = make_scheduler(needed, budget=4, groups=groups)
    scheduler.add(message("a", [1] * 900, max_tokens=100))
    with pytest.raises(InvalidRequestError):
        make_scheduler(needed - 1, budget=4, groups=groups).add(message("a", [1] * 900, max_tokens=100))


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(message("a", [1]))
    with pytest.raises(InvalidRequestError, match="'a' is in use") as error:
        scheduler.add(message("a", [2]))
    assert error.value.param == "request_id"


def test_an_empty_prompt_is_refused() -> None:
    scheduler = make_scheduler(4)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        scheduler.add(message("a", []))
    assert not scheduler.has_requests


@pytest.mark.parametrize("output", [[5, 6, 7], [5, EOS]])
def test_resuming_what_is_complete_is_refused(output: list[int]) -> None:
    scheduler = make_scheduler(4)
    with pytest.raises(InvalidRequestError, match="complete") as error:
        scheduler.add(message("a", [1], max_tokens=3, eos_ids=(EOS,), output_ids=output))
    assert error.value.param == "output_ids"
    assert not scheduler.has_requests


# -- coming back ----------------------------------------------------------------------------------


def test_a_resumed_request_goes_on_where_it_was() -> None:
    driver = Driver(Setup(longest=64))
    prompt = list(range(20))
    tokens, _ = solo_run(prompt, seed=3, max_tokens=10)
    name = driver.add(prompt, seed=3, max_tokens=10, resumed=6)
    driver.schedule()
    (new_row,) = driver.plans[0].new_rows
    assert (new_row.prompt_ids, new_row.output_ids) == (prompt, tokens[:6])
    assert [(row.start, row.num_tokens) for row in driver.plans[0].rows] == [(0, 16)]
    driver.drain()
    assert driver.cases[name].output == tokens


def test_a_resumed_request_that_is_undone_still_counts_as_never_admitted() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(message("a", [1] * 20, max_tokens=8, output_ids=[5, 6]))
    scheduler.schedule()
    scheduler.undo()
    assert get(scheduler, "a").status is RequestStatus.WAITING


def test_an_id_can_be_used_again_while_steps_of_its_old_owner_are_in_flight() -> None:
    scheduler = make_scheduler(4)
    executor = ScriptedExecutor(4, (FULL,), max_rows=8)
    scheduler.add(message("a", [1, 2, 3], max_tokens=8))
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        executor.submit(plan)
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.add(message("a", [9, 8], max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.dropped == ["a"]
    assert [row.prompt_ids for row in plan.new_rows] == [[9, 8]]
    executor.submit(plan)
    assert [scheduler.update(executor.collect()) for _ in range(2)] == [[], []]
    outputs = scheduler.update(executor.collect())
    plan = scheduler.schedule()
    assert plan is not None
    outputs += scheduler.update(executor.execute(plan))
    assert [o.new_token_ids[0] for o in outputs] == solo_run([9, 8], seed=0, max_tokens=2)[0]
    scheduler.check_integrity()
    assert scheduler.kv.num_available == 4


# -- memory ---------------------------------------------------------------------------------------


def test_what_another_computes_is_awaited_and_then_hit() -> None:
    scheduler = make_scheduler(16, budget=24)
    prompt = list(range(40))
    scheduler.add(message("a", prompt, max_tokens=2))
    scheduler.add(message("b", [*prompt, 99], max_tokens=2))
    scheduler.add(message("c", [50, 51], max_tokens=2))
    first = scheduler.schedule()
    assert ids(first) == ["a"]
    second = scheduler.schedule()  # 16 tokens of a are left; b waits for its blocks, c for nobody
    assert ids(second) == ["a", "c"]
    scheduler.update(answer(first))  # block 0 is there now, but block 1 is still being computed
    scheduler.update(answer(second))
    third = scheduler.schedule()
    assert ids(third) == ["a", "c", "b"]
    assert third is not None
    assert (third.rows[2].start, third.rows[2].num_tokens) == (32, 9)
    outputs = scheduler.update(answer(third))
    assert {o.request_id: o.num_cached_tokens for o in outputs} == {"a": 0, "b": 32, "c": 0}


def test_whoever_waits_for_a_block_goes_on_when_its_owner_goes() -> None:
    scheduler = make_scheduler(16, budget=24)
    prompt = list(range(40))
    scheduler.add(message("a", prompt, max_tokens=2))
    scheduler.add(message("b", prompt, max_tokens=2))
    assert ids(scheduler.schedule()) == ["a"]
    scheduler.finish("a", FinishReason.ABORT)
    assert ids(scheduler.schedule()) == ["b"]


def test_memory_given_back_by_a_plan_that_came_to_nothing_is_not_lost() -> None:
    """a's last token is in flight; c takes b's block and b's place in the plan, and still has to wait
    for it. Nothing is planned, and no step will ever have that number."""
    scheduler = make_scheduler(4, prefix_caching=False)
    scheduler.add(message("a", [1] * 4, max_tokens=2))
    scheduler.add(message("b", [2] * 4, max_tokens=8))
    scheduler.add(message("c", [3] * 31, max_tokens=8))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert ids(second) == ["a", "b", "c"]
    scheduler.update(answer(first))
    assert scheduler.schedule() is None
    assert get(scheduler, "b").status is RequestStatus.PREEMPTED
    assert scheduler.kv.num_available == 0
    scheduler.check_integrity()
    scheduler.update(answer(second))
    assert scheduler.kv.num_available == 2
    assert ids(scheduler.schedule()) == ["c", "b"]


def test_tokens_in_flight_count_though_their_request_was_preempted() -> None:
    driver = Driver(Setup(longest=64, budget=64, max_seqs=2, sequences=1))
    a = driver.add([1] * 30, max_tokens=34)
    b = driver.add([2] * 30, max_tokens=34)
    while driver.num_preemptions == 0:
        driver.schedule()
        if len(driver.plans) == 2:
            driver.retire()
    request = get(driver.scheduler, b)
    assert request.status is RequestStatus.PREEMPTED
    assert request.num_steps_in_flight > 0
    known = request.num_tokens
    while driver.plans:
        driver.retire()
    assert request.num_tokens == known + 1
    driver.drain()
    assert driver.cases[a].ended is driver.cases[b].ended is FinishReason.LENGTH


def test_an_aborted_request_gives_its_blocks_back_when_its_steps_retired() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(message("a", [1] * 40, max_tokens=8))
    first, second = scheduler.schedule(), scheduler.schedule()
    output = scheduler.finish("a", FinishReason.ABORT)
    assert output is not None
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ABORT)
    assert (scheduler.kv.num_available, scheduler.kv.num_retiring) == (1, 3)
    assert scheduler.update(answer(first)) == []
    assert (scheduler.kv.num_available, scheduler.kv.num_retiring) == (1, 3)
    assert scheduler.update(answer(second)) == []
    assert (scheduler.kv.num_available, scheduler.kv.num_retiring) == (4, 0)
    assert scheduler.finish("a", FinishReason.ABORT) is None
    scheduler.check_integrity()


@pytest.mark.parametrize("groups", [(FULL,), (KVGroup(4, (0,)),)], ids=["full", "window"])
def test_nobody_finds_what_an_errored_request_computed(groups: tuple[KVGroup, ...]) -> None:
    scheduler = make_scheduler(8, groups=groups)
    prompt = list(range(50))
    scheduler.add(message("a", prompt, max_tokens=8))
    scheduler.update(answer(scheduler.schedule()))  # registers blocks 0 to 2; a window let some go
    plan = scheduler.schedule()
    assert plan is not None
    error = SampledToken(request_id="a", position=51, token_id=0, error="the logits are NaN")
    (output,) = scheduler.update(ModelRunnerOutput(step=plan.step, sampled=[error]))
    assert (output.new_token_ids, output.finish_reason) == ([], FinishReason.ERROR)
    assert output.error == "the logits are NaN"
    assert scheduler.kv.pool.num_cached == 0
    scheduler.add(message("b", prompt, max_tokens=1))
    (output,) = scheduler.update(answer(scheduler.schedule()))
    assert output.num_cached_tokens == 0


def test_an_errored_request_that_waits_is_forgotten_too() -> None:
    driver = Driver(Setup(longest=64, budget=64, max_seqs=2, sequences=1))
    driver.add([1] * 30, max_tokens=34)
    b = driver.add([2] * 30, max_tokens=34)
    while driver.num_preemptions == 0:
        driver.schedule()
        driver.retire()
    kv, request = driver.scheduler.kv, get(driver.scheduler, b)
    assert kv.match_prefix(request).num_tokens == 16  # the tail went to the other
    driver.scheduler.finish(b, FinishReason.ERROR, error="it was its fault")
    assert kv.match_prefix(request).num_tokens == 0


# -- undo -----------------------------------------------------------------------------------------


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """What an undo must restore."""
    requests = sorted(scheduler._requests.values(), key=lambda request: request.sequence)
    return {
        "requests": [
            (
                request.request_id,
                request.status,
                request.num_computed_tokens,
                request.num_scheduled_tokens,
                request.num_pending,
                request.num_steps_in_flight,
                list(request.output_ids),
            )
            for request in requests
        ],
        "tables": {r.request_id: scheduler.kv.block_ids(r) for r in scheduler._running},
        "waiting": [request.request_id for request in scheduler._waiting],
        "available": scheduler.kv.num_available,
        "retiring": scheduler.kv.num_retiring,
    }


@pytest.mark.parametrize("groups", [(FULL,), (FULL, KVGroup(20, (1,)))], ids=["full", "full+window"])
def test_undo_restores_everything(groups: tuple[KVGroup, ...]) -> None:
    scheduler = make_scheduler(40, budget=24, max_seqs=3, groups=groups)
    executor = ScriptedExecutor(40, groups, max_rows=3)
    scheduler.add(message("a", list(range(60)), max_tokens=20))
    scheduler.add(message("b", [7] * 15, max_tokens=20))
    for _ in range(4):  # a decodes, b is about to need another block
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(executor.execute(plan))
    scheduler.add(message("c", [8] * 40, max_tokens=4))
    scheduler.add(message("d", [9] * 3, max_tokens=4))
    before = snapshot(scheduler)
    assert before["waiting"] == ["c", "d"]
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert ids(plans[0]) == ["a", "b", "c"]
    for plan in plans:
        assert plan is not None
        executor.submit(plan)
    assert snapshot(scheduler) != before
    executor.raise_on(plans[0].step if plans[0] else 0)
    with pytest.raises(RuntimeError, match="told to raise"):
        executor.collect()
    scheduler.undo()
    scheduler.check_integrity()
    assert snapshot(scheduler) == before
    assert scheduler.num_in_flight == 0

    plan = scheduler.schedule()
    assert plan is not None
    assert plan.reset
    assert plan.dropped == []
    assert [row.request_id for row in plan.new_rows] == ids(plan) == ids(plans[0])
    for row in plan.rows:
        tables = scheduler.kv.block_ids(get(scheduler, row.request_id))
        assert row.block_writes == [(0, table) for table in tables]
    assert [row.output_ids for row in plan.new_rows] == [get(scheduler, n).output_ids for n in ids(plan)]
    scheduler.update(executor.execute(plan))
    after = scheduler.schedule()
    assert after is not None
    assert not after.reset
    assert after.new_rows == []


def test_undo_keeps_what_retired_before_it() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(message("a", [1] * 20, max_tokens=8))
    first = scheduler.schedule()
    scheduler.schedule()
    scheduler.update(answer(first, token_id=5))
    scheduler.schedule()
    scheduler.undo()
    request = get(scheduler, "a")
    assert (request.output_ids, request.num_computed_tokens, request.num_scheduled_tokens) == ([5], 20, 20)
    plan = scheduler.schedule()
    assert plan is not None
    assert [(row.start, row.num_tokens, row.samples) for row in plan.rows] == [(20, 1, True)]


def test_undo_after_an_abort_gives_all_blocks_back() -> None:
    scheduler = make_scheduler(8)
    scheduler.add(message("a", [1] * 20, max_tokens=8))
    scheduler.schedule()
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.undo()
    scheduler.check_integrity()
    assert (scheduler.kv.num_available, scheduler.kv.num_retiring) == (8, 0)
    assert scheduler.schedule() is None


# -- diffs and budgets ----------------------------------------------------------------------------


def test_applying_diffs_twice_changes_nothing() -> None:
    once, twice = Driver(Setup(longest=64)), Driver(Setup(longest=64))
    twice.executor.apply_twice = True
    for driver in (once, twice):
        for i in range(4):
            driver.add([i] * (10 + i), seed=i, max_tokens=30)
    while once.live:
        for driver in (once, twice):
            driver.schedule()
        assert once.plans == twice.plans
        for name in once.executor.row_ids:
            assert once.executor.tables(name) == twice.executor.tables(name)
        for driver in (once, twice):
            driver.retire()
    assert once.num_preemptions > 0


def test_diffs_are_small() -> None:
    """A decode step tells the one block that it writes to, not the whole table."""
    scheduler = make_scheduler(8)
    scheduler.add(message("a", [1] * 40, max_tokens=40))
    for step in range(24):
        plan = scheduler.schedule()
        assert plan is not None
        (row,) = plan.rows
        ((index, blocks),) = row.block_writes
        assert (index, len(blocks)) == ((0, 3) if step == 0 else ((39 + step) // 16, 1))
        scheduler.update(answer(plan))


def test_a_budget_smaller_than_the_batch_serves_the_first_first() -> None:
    scheduler = make_scheduler(8, budget=2, max_seqs=4)
    for name in "abc":
        scheduler.add(message(name, [ord(name)], max_tokens=3))
    rows = []
    while scheduler.has_requests:
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.num_tokens <= 2
        rows.append("".join(ids(plan)))
        scheduler.update(answer(plan))
    assert rows == ["ab", "ab", "ab", "c", "c", "c"]


def test_a_smaller_priority_is_served_first() -> None:
    scheduler = make_scheduler(8, budget=1, policy=Policy.PRIORITY)
    scheduler.add(message("late", [1], max_tokens=1, priority=5))
    scheduler.add(message("soon", [2], max_tokens=1, priority=-1))
    assert ids(scheduler.schedule()) == ["soon"]
    assert ids(scheduler.schedule()) == ["late"]
