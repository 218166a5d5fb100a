"""Promise 1 on a real model: whatever the load, a request's bits are those of its solo run.

Each case runs the same prompts under other conditions and compares every row of logits, every token and
every logprob with the prompts run alone. `make test` takes fewer prompts than `make test-slow`, which
takes 40 on both backends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recording import BLOCKS, MODEL_LEN, Trace, make_prompts, run

from octavo import LLM
from octavo.messages import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler

CHUNKS = (1, 7, 16, 64, 512)


@dataclass(frozen=True)
class Suite:
    """One backend's prompts and solo run."""

    make: Callable[..., LLM]
    prompts: list[list[int]]
    solo: Trace
    block_nbytes: int

    def assert_equals_solo(self, trace: Trace) -> None:
        differing = self.solo.differences(trace, self.prompts)
        assert not differing, "\n".join(differing)


FAST = [("native", 24, 600), ("torch", 7, 150)]
FULL = [("native", 40, 600), ("torch", 40, 600)]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=f"{case[0]}-{case[1]}") for case in FAST),
        *(pytest.param(case, id=f"{case[0]}-{case[1]}-all", marks=pytest.mark.slow) for case in FULL),
    ],
)
def suite(request: pytest.FixtureRequest, smollm2_path: Path) -> Suite:
    backend, count, longest = request.param

    def make(**settings: Any) -> LLM:
        settings = {"threads": 2, "prefix_caching": False, "kv_cache_gib": 0.2, **settings}
        return LLM(str(smollm2_path), backend=backend, max_model_len=MODEL_LEN, **settings)

    prompts = make_prompts(count, longest)
    with make(max_num_seqs=1, max_num_batched_tokens=1024) as llm:
        bill = llm.info.bill
        return Suite(make, prompts, run(llm, prompts), bill.kv // bill.num_blocks)


def test_in_random_batches(suite: Suite) -> None:
    order = list(range(len(suite.prompts)))
    with suite.make(max_num_seqs=16, max_num_batched_tokens=256) as llm:
        for seed in (1, 2):
            random.Random(seed).shuffle(order)
            suite.assert_equals_solo(run(llm, suite.prompts, order=order))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked(suite: Suite, chunk: int, request: pytest.FixtureRequest) -> None:
    exhaustive = "all" in request.node.callspec.id
    keep = [i for i, prompt in enumerate(suite.prompts) if exhaustive or len(prompt) <= 40 * chunk]
    with suite.make(max_num_seqs=1, max_num_batched_tokens=chunk) as llm:
        trace = run(llm, suite.prompts, order=keep)
    differing = [
        line
        for line in suite.solo.differences(_filled(trace, suite.solo), suite.prompts)
        if int(line.split()[1]) in keep
    ]
    assert not differing, "\n".join(differing)
    assert set(trace.token_ids) == set(keep)


def _filled(trace: Trace, solo: Trace) -> Trace:
    """The trace, with the solo run in place of prompts that it left out."""
    rows = {key: digest for key, digest in solo.rows.items() if key[0] not in trace.token_ids}
    return Trace(
        {**rows, **trace.rows}, {**solo.token_ids, **trace.token_ids}, {**solo.logprobs, **trace.logprobs}
    )


def test_with_a_warm_prefix_cache(suite: Suite) -> None:
    with suite.make(max_num_seqs=8, prefix_caching=True) as llm:
        suite.assert_equals_solo(run(llm, suite.prompts))
        warm = run(llm, suite.prompts)
    suite.assert_equals_solo(warm)
    reusable = sum((len(prompt) - 1) // 16 * 16 for prompt in suite.prompts)
    assert warm.cached_tokens == reusable, "a warm cache holds every full block but the last token's"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_and_resumed(suite: Suite, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 1.5 sequences, and a random running request preempted before every third step."""
    preempted = _preempt_at_random(monkeypatch)
    gib = BLOCKS * 1.5 * suite.block_nbytes / 2**30
    with suite.make(max_num_seqs=16, kv_cache_gib=gib, prefix_caching=prefix_caching) as llm:
        assert llm.info.bill.num_blocks == BLOCKS * 1.5
        suite.assert_equals_solo(run(llm, suite.prompts))
    assert len(preempted) > len(suite.prompts) // 4


def _preempt_at_random(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rng = random.Random(3)
    victims: list[str] = []
    schedule = Scheduler.schedule

    def with_preemptions(self: Scheduler) -> SchedulerOutput | None:
        if self._running and rng.random() < 1 / 3:
            victim = rng.choice(self._running)
            victims.append(victim.request_id)
            self._preempt(victim)
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", with_preemptions)
    return victims


def test_one_thread_equals_two(suite: Suite) -> None:
    with suite.make(max_num_seqs=8, threads=1) as llm:
        suite.assert_equals_solo(run(llm, suite.prompts))
