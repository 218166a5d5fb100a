"""EngineCore over a real scheduler and a scripted executor: faults end their requests and no others."""

from __future__ import annotations

import pytest

from fakes import ScriptedExecutor, solo_run
from octavo.engine.core import EngineCore
from octavo.errors import InvalidRequestError
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerOutput
from octavo.program.ir import KVGroup
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

GROUPS = (KVGroup(None, (0,)),)
NUM_BLOCKS = 32
MAX_TOKENS = 5


class Seam:
    """The scripted executor behind the Executor protocol. fail_early: faults come from `execute`."""

    def __init__(self, fake: ScriptedExecutor, *, fail_early: bool = False) -> None:
        self.fake = fake
        self.fail_early = fail_early
        self.closed = 0
        self._result: ModelRunnerOutput | None = None

    def execute(self, plan: SchedulerOutput) -> None:
        self.fake.submit(plan)
        self._result = self.fake.collect() if self.fail_early else None

    def sample(self) -> ModelRunnerOutput:
        return self._result or self.fake.collect()

    def close(self) -> None:
        self.closed += 1


def make_core(*, max_seqs: int = 2, fail_early: bool = False) -> tuple[EngineCore, Seam]:
    kv = KVCacheManager(NUM_BLOCKS, GROUPS, step_tokens=64)
    seam = Seam(ScriptedExecutor(NUM_BLOCKS, GROUPS, max_rows=max_seqs), fail_early=fail_early)
    return EngineCore(Scheduler(SchedulerLimits(64, max_seqs), kv), seam), seam


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int = MAX_TOKENS) -> None:
    params = SamplingParams(seed=1, max_tokens=max_tokens)
    core.add(EngineRequest(request_id=name, prompt_ids=prompt, params=params))


def drain(core: EngineCore) -> dict[str, tuple[list[int], EngineOutput]]:
    """Step to the end: for each request its ids and its last output."""
    ids: dict[str, list[int]] = {}
    last: dict[str, EngineOutput] = {}
    while core.has_requests:
        for output in core.step():
            assert output.request_id not in last or last[output.request_id].finish_reason is None
            ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            last[output.request_id] = output
        core.scheduler.check_integrity()
    assert core.scheduler.kv.num_available == NUM_BLOCKS
    return {name: (ids[name], last[name]) for name in last}


def test_an_idle_step_does_nothing() -> None:
    core, seam = make_core()
    assert core.step() == []
    assert seam.fake.num_executed == 0


@pytest.mark.parametrize("fail_early", [False, True], ids=["in sample", "in execute"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_step_that_raises_ends_its_requests_and_no_others(step: int, fail_early: bool) -> None:
    core, seam = make_core(fail_early=fail_early)
    prompts = {name: [i, *range(20)] for i, name in enumerate(("a", "b", "c", "d"))}
    for name, prompt in prompts.items():
        add(core, name, prompt)
    seam.fake.raise_on(step)
    results = drain(core)
    for name in ("a", "b"):  # the two that ran
        ids, last = results[name]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error is not None
        assert f"InjectedFault: step {step} was told to raise" in last.error
        assert ids == solo_run(prompts[name], seed=1, max_tokens=step - 1)[0]
    for name in ("c", "d"):
        ids, last = results[name]
        assert (ids, last.finish_reason) == solo_run(prompts[name], seed=1, max_tokens=MAX_TOKENS)
        assert last.error is None


def test_after_a_failed_step_the_same_prompt_is_computed_anew() -> None:
    core, seam = make_core()
    prompt = list(range(40))
    add(core, "a", prompt)
    seam.fake.raise_on(2)
    assert drain(core)["a"][1].finish_reason is FinishReason.ERROR
    seam.fake.poison("a")  # reading what it wrote raises
    add(core, "again", prompt)
    ids, last = drain(core)["again"]
    assert (ids, last.finish_reason) == solo_run(prompt, seed=1, max_tokens=MAX_TOKENS)
    assert last.num_cached_tokens == 0


def test_steps_may_fail_again_and_again() -> None:
    core, seam = make_core()
    for i in range(6):
        add(core, f"r{i}", [i, 1, 2])
    for step in (1, 2, 3):
        seam.fake.raise_on(step)
    reasons = [last.finish_reason for _, last in drain(core).values()]
    assert reasons == [FinishReason.ERROR] * 6


def test_a_row_that_can_not_be_sampled_ends_alone() -> None:
    core, seam = make_core()
    add(core, "good", [1, 2, 3])
    add(core, "bad", [4, 5, 6])
    seam.fake.error_on("bad")
    results = drain(core)
    assert results["bad"][1].error == "the logits are NaN"
    assert results["bad"][0] == []
    assert results["good"][0] == solo_run([1, 2, 3], seed=1, max_tokens=MAX_TOKENS)[0]


def test_aborts_wherever_a_request_stands() -> None:
    core, _ = make_core()
    for name in ("running", "other", "waiting"):
        add(core, name, list(range(20)))
    core.step()
    for name in ("waiting", "running"):
        output = core.abort(name)
        assert output is not None
        assert (output.request_id, output.finish_reason) == (name, FinishReason.ABORT)
    assert core.abort("running") is None
    assert core.abort("never heard of") is None
    assert set(drain(core)) == {"other"}


def test_what_is_refused_leaves_nothing_behind() -> None:
    core, _ = make_core()
    with pytest.raises(InvalidRequestError):
        add(core, "big", [1] * 20, max_tokens=NUM_BLOCKS * 16)
    assert not core.has_requests


def test_close_frees_the_executor() -> None:
    core, seam = make_core()
    core.close()
    assert seam.closed == 1
