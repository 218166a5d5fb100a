"""What the core counts and times: over a real scheduler, a scripted executor and a clock told what to say."""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import ScriptedExecutor
from octavo.engine.core import EngineCore
from octavo.engine.core_client import InProcessClient, ThreadClient
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerOutput
from octavo.observability.stats import EngineStats, RequestTimes
from octavo.program.ir import KVGroup
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

GROUPS = (KVGroup(None, (0,)),)
STEP = 0.25


class Clocked:
    """The scripted executor; each step takes STEP on the clock. slow: seconds that a step really takes."""

    def __init__(self, fake: ScriptedExecutor) -> None:
        self.fake = fake
        self.now = 1000.0
        self.slow: dict[int, float] = {}
        self.hold: threading.Event | None = None
        self._step = 0

    def clock(self) -> float:
        return self.now

    def execute(self, plan: SchedulerOutput) -> None:
        self._step = plan.step
        self.fake.submit(plan)

    def sample(self) -> ModelRunnerOutput:
        self.now += STEP
        if self._step in self.slow:
            sleep_in_a_kernel(self.slow[self._step])
        if self.hold is not None:
            self.hold.wait(30)
        return self.fake.collect()

    def close(self) -> None:
        pass


def sleep_in_a_kernel(seconds: float) -> None:
    time.sleep(seconds)


def make_core(
    *, num_blocks: int = 32, max_seqs: int = 4, budget: int = 64, real_time: bool = False
) -> tuple[EngineCore, Clocked]:
    kv = KVCacheManager(num_blocks, GROUPS, step_tokens=budget)
    seam = Clocked(ScriptedExecutor(num_blocks, GROUPS, max_rows=max_seqs))
    scheduler = Scheduler(SchedulerLimits(budget, max_seqs), kv)
    return EngineCore(scheduler, seam, time.monotonic if real_time else seam.clock), seam


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    core.add(EngineRequest(request_id=name, prompt_ids=prompt, params=params, **fields))


def drain(core: EngineCore) -> dict[str, EngineOutput]:
    """Step to the end; last outputs by request."""
    last = {}
    while core.has_requests:
        for output in core.step():
            if output.finish_reason is None:
                assert output.times is None
            else:
                assert output.request_id not in last
                last[output.request_id] = output
    return last


def test_times_are_the_clocks() -> None:
    core, seam = make_core(max_seqs=1)
    add(core, "a", list(range(100)), arrival=999.0)  # two steps of prompt, then three
    add(core, "b", [1, 2, 3], arrival=999.5)  # waits for all five
    last = drain(core)
    assert last["a"].times == RequestTimes(
        arrival=999.0, first_scheduled=1000.0, first_token=1000.5, end=1001.25
    )
    assert last["b"].times == RequestTimes(
        arrival=999.5, first_scheduled=1001.25, first_token=1001.5, end=1002.25
    )
    times = last["b"].times
    assert (times.queue, times.prefill, times.decode) == (1.75, 0.25, 0.75)
    stats = core.stats()
    assert stats.steps == stats.step_seconds.count == 9
    assert stats.step_seconds.total == pytest.approx(9 * STEP)
    seam.now += 7
    assert (core.stats().seconds_since_step, core.stats().step_running) == (7, 0)


def test_requests_that_never_ran_or_never_answered_have_times_too() -> None:
    core, _ = make_core(max_seqs=1)
    add(core, "running", list(range(100)), arrival=999.0)
    add(core, "waiting", [1], arrival=999.0)
    core.step()
    waiting, running = core.abort("waiting"), core.abort("running")
    assert waiting is not None
    assert running is not None
    assert waiting.times == RequestTimes(arrival=999.0, end=1000.25)
    assert (waiting.times.queue, waiting.times.prefill, waiting.times.decode) == (1.25, None, None)
    assert running.times == RequestTimes(arrival=999.0, first_scheduled=1000.0, end=1000.25)
    assert (running.times.queue, running.times.prefill, running.times.decode) == (1.0, 0.25, None)


def test_a_fresh_core_and_an_idle_one() -> None:
    core, _ = make_core()
    fresh = core.stats()
    assert (fresh.running, fresh.waiting, fresh.steps, fresh.seconds_since_step) == (0, 0, 0, None)
    assert msgspec.structs.asdict(fresh.blocks) == {"total": 32, "free": 32, "cached": 0, "referenced": 0}
    assert core.step() == []
    assert core.stats() == fresh  # an idle step is none
    for name in ("a", "b"):
        add(core, name, list(range(40)))
    assert core.stats().waiting == 2
    core.step()
    busy = core.stats()
    assert (busy.running, busy.waiting) == (1, 1)  # the other waits for the same prompt
    assert busy.blocks.referenced == 3
    assert busy.sizes["ledger"] == busy.sizes["scheduler_requests"] == 2
    drain(core)
    idle = core.stats()
    assert (idle.running, idle.waiting, idle.blocks.referenced) == (0, 0, 0)
    assert not any(idle.sizes.values())
    assert idle.ends == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(idle), type=EngineStats) == idle


def test_clients_in_this_process_hand_on_what_the_core_says() -> None:
    core, _ = make_core()
    add(core, "a", [1, 2, 3])
    threaded = ThreadClient(core, lambda _: None, lambda _: None)
    while threaded.stats().ends["length"] == 0:
        time.sleep(0.01)
    threaded.close()
    assert threaded.stats() == InProcessClient(core).stats() == core.stats()


@pytest.mark.parametrize("resumed", [[], [5, 6, 7]])
def test_each_token_of_a_prompt_is_computed_or_cached_and_counted_once(resumed: list[int]) -> None:
    core, _ = make_core()
    prompt = list(range(40))
    add(core, "a", prompt, max_tokens=6, output_ids=resumed)
    drain(core)
    tokens = core.stats().tokens
    assert (tokens.prompt_computed, tokens.prompt_cached) == (40, 0)
    assert (tokens.generated, tokens.recomputed) == (6 - len(resumed), len(resumed))
    add(core, "b", [*prompt, 50], max_tokens=2)
    assert drain(core)["b"].num_cached_tokens == 32
    tokens = core.stats().tokens
    assert (tokens.prompt_computed, tokens.prompt_cached) == (40 + 9, 32)


@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8),
    budget=st.integers(1, 40),
    num_blocks=st.integers(7, 12),
    faults=st.sets(st.integers(1, 40), max_size=2),
    aborts=st.sets(st.integers(0, 7), max_size=3),
)
def test_the_sums_are_right_whatever_happens(
    requests: list[tuple[int, int]], budget: int, num_blocks: int, faults: set[int], aborts: set[int]
) -> None:
    """Preemptions, failed steps and aborts: the ledger agrees with the executor and with the outputs."""
    core, seam = make_core(num_blocks=num_blocks, budget=budget)
    for step in faults:
        seam.fake.raise_on(step)
    for i, (length, max_tokens) in enumerate(requests):
        add(core, str(i), [i % 2, *range(length - 1)], max_tokens)
    computed = generated = 0
    ends: list[EngineOutput] = []
    execute = seam.execute

    def counting(plan: SchedulerOutput) -> None:
        nonlocal computed
        computed += plan.num_tokens if plan.step not in faults else 0
        execute(plan)

    seam.execute = counting  # type: ignore[method-assign]
    logging.getLogger("octavo.engine.core").disabled = True
    while core.has_requests:
        outputs = core.step()
        if core.stats().steps == 3:
            outputs += [o for i in aborts if (o := core.abort(str(i))) is not None]
        generated += sum(len(output.new_token_ids) for output in outputs)
        ends += [output for output in outputs if output.finish_reason is not None]
        stats = core.stats()
        assert stats.running + stats.waiting == stats.sizes["ledger"]
        assert stats.blocks.free + stats.blocks.cached + stats.blocks.referenced == num_blocks
    logging.getLogger("octavo.engine.core").disabled = False
    stats, tokens = core.stats(), core.stats().tokens
    assert sorted(end.request_id for end in ends) == [str(i) for i in range(len(requests))]
    assert stats.ends == {r.value: sum(end.finish_reason is r for end in ends) for r in FinishReason}
    assert stats.preemptions == sum(end.num_preemptions for end in ends)
    assert stats.preemptions == sum(record.preemptions for record in core.steps.last())
    assert tokens.generated == generated
    assert tokens.prompt_cached == sum(end.num_cached_tokens for end in ends)
    answers = sum(end.finish_reason is FinishReason.LENGTH for end in ends)
    if answers == len(ends):
        assert tokens.prompt_computed + tokens.prompt_cached == sum(length for length, _ in requests)
        # The last token of each is sampled, and never computed.
        assert computed == tokens.prompt_computed + tokens.recomputed + generated - len(ends)
    core.close()


def test_preemptions_are_counted_and_cost_recomputed_tokens() -> None:
    core, _ = make_core(num_blocks=5)
    for name in ("a", "b"):
        add(core, name, [ord(name)] * 20, max_tokens=40)
    last = drain(core)
    stats = core.stats()
    assert stats.preemptions == sum(output.num_preemptions for output in last.values()) > 0
    assert stats.tokens.recomputed > 0
    assert stats.tokens.prompt_computed + stats.tokens.prompt_cached == 40
    assert stats.tokens.generated == 80


def test_a_failed_step_computed_nothing(caplog: pytest.LogCaptureFixture) -> None:
    core, seam = make_core()
    add(core, "before", [1] * 20, max_tokens=1)
    drain(core)
    add(core, "a", [2] * 20)
    seam.fake.raise_on(2)
    output = drain(core)["a"]
    assert output.times is not None
    assert core.stats().tokens.prompt_computed == 20
    assert core.stats().ends == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert core.stats().steps == 2
    assert "The steps before it: 1 (250.0 ms, 20 tokens of 1 requests)" in caplog.text


def test_a_slow_step_is_caught_in_the_act(caplog: pytest.LogCaptureFixture) -> None:
    core, seam = make_core(num_blocks=64, real_time=True)
    add(core, "a", [1, 2, 3], max_tokens=40)
    seam.slow[30] = 0.5
    last = drain(core)
    core.close()
    assert last["a"].finish_reason is FinishReason.LENGTH
    slow = [record for record in core.steps.last() if record.stacks]
    assert [record.step for record in slow] == [30]
    assert slow[0].seconds >= 0.5
    assert 1 <= len(slow[0].stacks) <= 5
    assert all("sleep_in_a_kernel" in stack for stack in slow[0].stacks)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith("step 30 has been running for ")
    assert "sleep_in_a_kernel" in record.getMessage()


def test_a_step_that_hangs_can_be_asked_about() -> None:
    core, seam = make_core(real_time=True)
    add(core, "a", [1, 2, 3], max_tokens=2)
    core.step()
    seam.hold = threading.Event()
    thread = threading.Thread(target=core.step)
    thread.start()
    time.sleep(0.2)
    began = time.monotonic()
    stats = core.stats()
    assert time.monotonic() - began < 0.1
    assert stats.step_running >= 0.1
    assert (stats.running, stats.steps) == (1, 1)
    seam.hold.set()
    thread.join()
    stats = core.stats()
    assert (stats.running, stats.steps, stats.step_running) == (0, 2, 0)
    core.close()


def test_numbers_belong_together_whenever_they_are_asked_for() -> None:
    core, _ = make_core(num_blocks=12, real_time=True)
    seen: list[EngineStats] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            seen.append(core.stats())

    thread = threading.Thread(target=ask)
    thread.start()
    for i in range(60):
        add(core, str(i), [i] * 20, max_tokens=20)
    drain(core)
    done.set()
    thread.join()
    core.close()
    assert len(seen) > 20
    for stats in seen:
        assert stats.blocks.free + stats.blocks.cached + stats.blocks.referenced == 12
        assert stats.running + stats.waiting == stats.sizes["ledger"] == stats.sizes["scheduler_requests"]
        assert (stats.running == 0) == (stats.blocks.referenced == 0)
