"""The scheduler, the KV manager and the pool under random load, against requests run alone.

`Driver` offers the moves that the world can make (a request comes, is aborted, fails; a step is planned,
retires, raises) and checks after each what must hold. The soak makes these moves at random from a seed;
`test_scheduler_machine.py` lets hypothesis choose them, `test_scheduler_mutants.py` plants faults.

How long a request may take (fcfs, no step fails). Let D be the most steps in flight, c(r) the cost of a
request r of n tokens at most, of which k are known, with a budget of b tokens (1 where r wants logprobs of
its prompt: then it may get only one row of logits in a step):

    c(r) = ceil(k / b) + (tokens still to sample) + (D - 1) * ceil(n / 16) + D     retired steps

*The first in order among the running.* It is never preempted while it is first, and is served before
all others, so each plan that has it computes min(b, what is left) of its tokens: the first two terms. A
plan leaves it out only when it wants blocks that steps in flight still hold. Nobody else takes blocks
meanwhile, so it waits until the steps in flight at that moment, at most D - 1, have retired, once for
each of its block indices: the third term. Then its last step retires: the fourth.

*The oldest of all, G.* If it runs it is the first in order: c(G). If it waits, nobody passes it but
those it lets pass because another computes its next block (prefix caching).
- Without prefix caching no one is admitted before G: the running ones end, each within its cost from
  when it is first, so G runs after sum of c(r) over the running, + D.
- With it, G waits for owners of its blocks that ran when it became the oldest: a later one with G's
  prefix would have had to pass G, which it doesn't, since G's next block is its next block too. Until
  these are done the first in order is one of the m requests that were there when G became the oldest. A
  first ends or is displaced by an older one, so between two ends there are at most m firsts: m * m * C
  steps, C the cost of the longest request. Then nobody passes: at most max_num_seqs * C steps, + D.

Ends of others, by whatever reason, only shorten this. The request that is k-th in order is the oldest
after k such bounds. Every admitted request finishes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from fakes import VOCAB_SIZE, InjectedFault, ScriptedExecutor, prompt_logprobs, solo_run
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineRequest, RowStep, SchedulerOutput, TokenLogprobs
from octavo.program.ir import BLOCK_SIZE, KVGroup
from octavo.request import FinishReason, Request, RequestStatus
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policy import Policy, order_key
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

FULL = KVGroup(None, (0,))
LAYOUTS = {
    "full": (FULL,),
    "full+window": (FULL, KVGroup(24, (1,))),
    "windows": (KVGroup(7, (0,)), KVGroup(33, (1,))),
}
EOS = 0


@dataclass(frozen=True)
class Setup:
    """An engine's settings. longest: tokens of the longest request; the pool holds `sequences` such.

    With a rope_boundary, requests that grow past it start again, also the first in order: how long each may
    take is not checked then.
    """

    groups: tuple[KVGroup, ...] = LAYOUTS["full"]
    policy: Policy = Policy.FCFS
    prefix_caching: bool = True
    budget: int = 16
    max_seqs: int = 4
    depth: int = 2
    longest: int = 72
    sequences: float = 1.5
    rope_boundary: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        one = self._manager(1).blocks_for(self.longest)
        return math.ceil(self.sequences * one)

    def _manager(self, num_blocks: int) -> KVCacheManager:
        return KVCacheManager(
            num_blocks,
            self.groups,
            prefix_caching=self.prefix_caching,
            step_tokens=self.depth * self.budget,
        )

    def scheduler(self) -> Scheduler:
        """A scheduler with nothing to do."""
        limits = SchedulerLimits(self.budget, self.max_seqs)
        kv = self._manager(self.num_blocks)
        return Scheduler(limits, kv, policy=self.policy, rope_boundary=self.rope_boundary)


@dataclass
class Case:
    """A request, what it must answer and what it answered."""

    message: EngineRequest
    answer: list[int]
    reason: FinishReason
    output: list[int] = field(default_factory=list)
    ended: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # as they came


class Driver:
    """An engine core without time: moves, and what must hold after each."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.executor = ScriptedExecutor(
            setup.num_blocks,
            setup.groups,
            max_rows=setup.max_seqs,
            salt_of=lambda name: self.cases[name].message.cache_salt,
            rope_boundary=setup.rope_boundary,
        )
        self.cases: dict[str, Case] = {}
        self.live: list[str] = []
        self.plans: list[SchedulerOutput] = []
        self.clock = 0  # steps retired or undone
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_faults = 0
        self._key = order_key(setup.policy)
        self._stalled: tuple[str, int] | None = None  # the first in order, and when its wait must end
        self._oldest: str | None = None
        self._oldest_runs = False
        self._deadline = 0

    # -- moves ----------------------------------------------------------------------------------

    def add(
        self,
        prompt_ids: list[int],
        *,
        seed: int = 0,
        max_tokens: int = 8,
        eos: bool = False,
        priority: int = 0,
        salt: str = "",
        resumed: int = 0,
        logprobs: bool = False,
    ) -> str:
        """A request comes, perhaps one of which another engine sampled `resumed` tokens already."""
        stop_ids = frozenset([EOS]) if eos else frozenset()
        answer, reason = solo_run(
            prompt_ids, seed=seed, max_tokens=max_tokens, stop_ids=stop_ids, salt=salt,
            rope_boundary=self.setup.rope_boundary,
        )  # fmt: skip
        output = answer[: max(0, min(resumed, len(answer) - 1))]
        message = EngineRequest(
            request_id=f"r{len(self.cases)}",
            prompt_ids=prompt_ids,
            params=SamplingParams(seed=seed, max_tokens=max_tokens, prompt_logprobs=0 if logprobs else None),
            eos_ids=tuple(stop_ids),
            priority=priority,
            cache_salt=salt,
            output_ids=output,
        )
        self.cases[message.request_id] = Case(message, answer, reason, list(output))
        self.live.append(message.request_id)
        self.scheduler.add(message)
        self.check()
        return message.request_id

    def abort(self, request_id: str) -> None:
        """The caller goes away."""
        output = self.scheduler.finish(request_id, FinishReason.ABORT)
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
        self._end(request_id, FinishReason.ABORT)
        assert self.scheduler.finish(request_id, FinishReason.ABORT) is None
        self.check()

    def schedule(self) -> bool:
        """Plan a step. Whether there was one."""
        assert len(self.plans) < self.setup.depth
        wants = self._first_wants_tokens()
        before = sum(r.num_preemptions for r in self._requests())
        plan = self.scheduler.schedule()
        self.num_preemptions += sum(r.num_preemptions for r in self._requests()) - before
        self._check_first(wants, plan)
        if plan is not None:
            assert 0 < plan.num_tokens <= self.setup.budget
            assert plan.num_sampled <= self.setup.max_seqs
            self.executor.submit(plan)
            self.plans.append(plan)
        else:
            assert self.plans or not self.live, "nothing is in flight, requests wait, and nothing is planned"
        self.check()
        return plan is not None

    def retire(self) -> None:
        """The oldest step in flight ends, one way or the other."""
        try:
            result = self.executor.collect()
        except InjectedFault:
            self.num_faults += 1
            self.clock += len(self.plans)
            self.plans.clear()
            self.scheduler.undo()
            self._oldest = None
            self.check()
            return
        plan = self.plans.pop(0)
        self.clock += 1
        expected = [
            step.request_id
            for step in plan.rows
            if step.request_id in self.live and (step.samples or self._computes_all(step))
        ]
        outputs = self.scheduler.update(result)
        assert [output.request_id for output in outputs] == expected
        for output in outputs:
            case = self.cases[output.request_id]
            case.output += output.new_token_ids
            if output.prompt_logprobs is not None:
                assert case.prompt_logprobs is None, f"{output.request_id}: prompt logprobs came twice"
                case.prompt_logprobs = output.prompt_logprobs
            assert case.output == case.answer[: len(case.output)], f"{output.request_id}: other tokens"
            assert output.num_cached_tokens % BLOCK_SIZE == 0
            assert output.num_cached_tokens < len(case.message.prompt_ids) + len(case.message.output_ids)
            if case.message.params.prompt_logprobs is not None:
                assert output.num_cached_tokens == 0, "logits of what is cached are not known"
            if output.finish_reason is not None:
                self._end(output.request_id, output.finish_reason)
                self.num_cached_tokens += output.num_cached_tokens
                if output.finish_reason is FinishReason.ERROR:
                    self.executor.poison(output.request_id)
        self.check()

    def fail(self, index: int) -> None:
        """A step in flight will raise."""
        self.executor.raise_on(self.plans[index].step)

    def error(self, request_id: str) -> None:
        """The next token of a request will be an error."""
        self.executor.error_on(request_id)

    def drain(self) -> None:
        """Run until nothing is left to do; then all memory must be available."""
        while self.live or self.plans:
            while len(self.plans) < self.setup.depth and self.schedule():
                pass
            self.retire()
        kv = self.scheduler.kv
        assert not self.scheduler.has_requests
        assert (kv.num_available, kv.num_retiring) == (self.setup.num_blocks, 0)
        assert all(case.ended for case in self.cases.values())

    # -- what must hold -------------------------------------------------------------------------

    def _requests(self) -> list[Request]:
        requests = [self.scheduler.request(name) for name in self.live]
        return [request for request in requests if request is not None]

    def _running(self) -> list[Request]:
        return [r for r in self._requests() if r.status is RequestStatus.RUNNING]

    def _end(self, request_id: str, reason: FinishReason) -> None:
        case = self.cases[request_id]
        assert case.ended is None, f"{request_id} ends twice"
        case.ended = reason
        self.live.remove(request_id)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (case.output, reason) == (case.answer, case.reason), f"{request_id}: another answer"
            message, wanted = case.message, None
            if message.params.prompt_logprobs is not None:
                wanted = prompt_logprobs(message.prompt_ids, message.cache_salt)
            assert case.prompt_logprobs == wanted, f"{request_id}: other prompt logprobs"

    def check(self) -> None:
        """What holds after every move."""
        self.scheduler.check_integrity()
        assert len(self._requests()) == len(self.live)
        assert self.scheduler.has_requests == bool(self.live)
        assert self.scheduler.num_in_flight == len(self.plans)
        if self.setup.policy is Policy.FCFS and not self.num_faults and self.setup.rope_boundary is None:
            self._check_oldest()

    def _computes_all(self, step: RowStep) -> bool:
        """Whether a request that samples nothing ends with this step."""
        case = self.cases[step.request_id]
        request = self.scheduler.request(step.request_id)
        assert request is not None
        runs = request.status is RequestStatus.RUNNING and request.num_steps_in_flight == 1
        whole = step.start + step.num_tokens == len(case.message.prompt_ids)
        return case.message.params.max_tokens == 0 and runs and whole

    def _first_wants_tokens(self) -> str | None:
        """The first in order among the running, if it has tokens to compute."""
        first = min(self._running(), key=self._key, default=None)
        if first is None or not first.num_unscheduled_tokens:
            return None
        if 0 < first.max_tokens <= len(first.output_ids) + first.num_pending:
            return None
        return first.request_id

    def _check_first(self, wants: str | None, plan: SchedulerOutput | None) -> None:
        """The first in order is in every plan, unless it waits for steps in flight to retire."""
        if wants is None or self.setup.rope_boundary is not None:
            return
        request = self.scheduler.request(wants)
        assert request is not None
        assert request.status is RequestStatus.RUNNING, f"{wants} was first and is preempted"
        if plan is not None and wants in [step.request_id for step in plan.rows]:
            self._stalled = None
            return
        if self._stalled is None or self._stalled[0] != wants:
            self._stalled = wants, self.clock + len(self.plans)
        assert self.clock < self._stalled[1], f"{wants} is first and waits for nothing that is in flight"

    def _check_oldest(self) -> None:
        """The oldest request ends in time; see the module's docstring."""
        oldest = self._requests()[0] if self.live else None
        if oldest is None:
            self._oldest = None
            return
        runs = oldest.status is RequestStatus.RUNNING
        if oldest.request_id != self._oldest:
            self._oldest, self._oldest_runs = oldest.request_id, False
            self._deadline = self.clock + self._longest_wait() + self._cost(oldest)
        if runs and not self._oldest_runs:
            self._deadline = min(self._deadline, self.clock + self._cost(oldest))
        assert runs or not self._oldest_runs, f"{self._oldest} is the oldest, ran, and was preempted"
        self._oldest_runs = runs
        assert self.clock <= self._deadline, f"{self._oldest} took longer than the bound"

    def _cost(self, request: Request) -> int:
        length = len(request.prompt_ids) + request.max_tokens
        left = request.max_tokens - len(request.output_ids)
        budget = self.setup.budget if request.params.prompt_logprobs is None else 1
        return self._cost_of(request.num_tokens, left, length, budget)

    def _cost_of(self, known: int, left: int, length: int, budget: int) -> int:
        depth = self.setup.depth
        blocks = math.ceil(length / BLOCK_SIZE)
        return math.ceil(known / budget) + left + (depth - 1) * blocks + depth

    def _longest_wait(self) -> int:
        setup = self.setup
        if not setup.prefix_caching:
            return sum(self._cost(request) for request in self._running()) + setup.depth
        longest = self._cost_of(setup.longest, setup.longest, setup.longest, 1)
        return (len(self.live) ** 2 + setup.max_seqs) * longest + setup.depth


# -- random load --------------------------------------------------------------------------------


def draw_setup(rng: random.Random) -> Setup:
    """Settings that hurt: small budgets, few rows, a pool of one and a half sequences."""
    return Setup(
        groups=rng.choice(list(LAYOUTS.values())),
        policy=rng.choice(list(Policy)),
        prefix_caching=rng.random() < 0.8,
        budget=rng.choice([1, 3, 7, 16, 20, 48, 48]),
        max_seqs=rng.choice([2, 5, 8, 8]),
        depth=rng.choice([1, 2, 2, 3]),
        longest=rng.choice([33, 72, 100]),
        sequences=rng.choice([1.5, 1.5, 2, 4]),
        rope_boundary=rng.choice([None, None, None, 20, 32, 45]),
    )


class RandomLoad:
    """Moves drawn from a seed."""

    def __init__(self, seed: int, setup: Setup | None = None, *, faults: bool | None = None) -> None:
        self.rng = rng = random.Random(seed)
        setup = setup or draw_setup(rng)
        self.driver = Driver(setup)
        self._faults = rng.random() < 0.5 if faults is None else faults
        self._with_logprobs = seed % 4 == 3  # of prompts, and requests that sample nothing
        self._crowd = setup.max_seqs + rng.choice([1, 4])
        self._longest_prompt = rng.choice([6, 20, setup.longest - 1])
        self._prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(setup.longest)] for _ in range(3)]

    def run(self, num_steps: int) -> int:
        """Make moves until that many steps were executed, then drain. How many steps it took."""
        driver = self.driver
        while driver.executor.num_executed < num_steps:
            self._move()
        driver.drain()
        return driver.executor.num_executed

    def _move(self) -> None:
        rng, driver = self.rng, self.driver
        driver.executor.apply_twice = rng.random() < 0.1
        dice = rng.random()
        if dice < 0.2:
            if len(driver.live) < self._crowd:
                self._add()
        elif dice < 0.21:
            if driver.live:
                driver.abort(rng.choice(driver.live))
        elif dice < 0.215:
            if driver.live and self._faults:
                driver.error(rng.choice(driver.live))
        elif dice < 0.23:
            if driver.plans and self._faults:
                driver.fail(rng.randrange(len(driver.plans)))
        elif dice < 0.63:
            if len(driver.plans) < driver.setup.depth:
                driver.schedule()
        elif driver.plans:
            driver.retire()

    def _add(self) -> None:
        rng, longest = self.rng, self.driver.setup.longest
        length = rng.randint(1, self._longest_prompt)
        shared = rng.choice([0, rng.randint(0, length), length, length])
        prompt = rng.choice(self._prefixes)[:shared]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length - shared)]
        self.driver.add(
            prompt,
            seed=rng.randrange(3),
            max_tokens=rng.randint(
                0 if self._with_logprobs else 1, min(longest - length, rng.choice([4, longest, longest]))
            ),
            eos=rng.random() < 0.3,
            priority=rng.randrange(3),
            salt=rng.choice(["", "", "", "tenant"]),
            resumed=rng.choice([0, 0, 0, 5]),
            logprobs=self._with_logprobs and rng.random() < 0.4,
        )


def assert_soak_is_exact(num_steps: int, first_seed: int) -> None:
    """Execute `num_steps` steps of random load, about 100 for each of as many seeds as it takes."""
    executed = preemptions = cached = faults = finished = 0
    seed = first_seed
    kinds = set()
    while executed < num_steps:
        load = RandomLoad(seed)
        try:
            executed += load.run(min(80, num_steps - executed))
        except Exception as error:
            error.add_note(f"seed {seed}: {load.driver.setup}")
            raise
        kinds.add((load.driver.setup.groups, load.driver.setup.policy))
        preemptions += load.driver.num_preemptions
        cached += load.driver.num_cached_tokens
        faults += load.driver.num_faults
        finished += len(load.driver.cases)
        seed += 1
    assert executed >= num_steps
    # A soak in which nothing happens proves nothing.
    assert len(kinds) == len(LAYOUTS) * len(Policy)
    assert preemptions > num_steps // 100
    assert cached > num_steps // 16
    assert faults > num_steps // 200
    assert finished > num_steps // 12


def test_random_load_answers_as_alone() -> None:
    """5,000 steps over all layouts and policies."""
    assert_soak_is_exact(5_000, first_seed=0)


@pytest.mark.slow
def test_long_random_load_answers_as_alone() -> None:
    """100,000 steps over all layouts and policies."""
    assert_soak_is_exact(100_000, first_seed=1_000_000)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_burst_drains_within_the_bound(layout: str, prefix_caching: bool) -> None:
    """Requests that come all at once, with room for one and a half, end one after the other in time
    (`Driver._check_oldest` holds each to its bound)."""
    for seed, budget in enumerate([1, 5, 64]):
        setup = Setup(
            groups=LAYOUTS[layout], prefix_caching=prefix_caching, budget=budget, max_seqs=4, longest=64
        )
        driver = Driver(setup)
        rng = random.Random(seed)
        shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
        for i in range(8):
            tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
            driver.add(shared[: rng.randint(0, 40)] + tail, seed=i, max_tokens=16)
        driver.drain()
        assert all(case.ended is FinishReason.LENGTH for case in driver.cases.values())
