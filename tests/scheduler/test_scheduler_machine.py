"""Hypothesis chooses the moves of `Driver`, and shrinks what breaks it to the shortest story."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from test_scheduler_soak import LAYOUTS, Driver, Setup

from octavo.scheduler.policy import Policy

#: Prompts are a piece of one of these and a tail, so that some share blocks.
TEXTS = ([i % 24 for i in range(96)], [(7 * i + 3) % 24 for i in range(96)])

setups = st.builds(
    Setup,
    groups=st.sampled_from(list(LAYOUTS.values())),
    policy=st.sampled_from(Policy),
    prefix_caching=st.booleans(),
    budget=st.sampled_from([1, 2, 5, 16, 33, 64]),
    max_seqs=st.integers(1, 6),
    depth=st.integers(1, 2),
    longest=st.sampled_from([20, 50, 80]),
    sequences=st.sampled_from([1.5, 2, 4]),
    rope_boundary=st.sampled_from([None, None, 16, 30]),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go, steps are planned, retire or raise; `Driver` checks."""

    @initialize(setup=setups)
    def start(self, setup: Setup) -> None:
        self.driver = Driver(setup)

    @precondition(lambda self: len(self.driver.live) < 8)
    @rule(
        data=st.data(),
        text=st.sampled_from(TEXTS),
        tail=st.lists(st.integers(0, 23), min_size=1, max_size=3),
        seed=st.integers(0, 2),
        eos=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "tenant"]),
        resumed=st.sampled_from([0, 3]),
        logprobs=st.booleans(),
    )
    def add(
        self,
        data: st.DataObject,
        text: list[int],
        tail: list[int],
        seed: int,
        eos: bool,
        priority: int,
        salt: str,
        resumed: int,
        logprobs: bool,
    ) -> None:
        room = self.driver.setup.longest - len(tail) - 1
        shared = data.draw(st.integers(0, room))
        max_tokens = data.draw(st.integers(0, room + 1 - shared))
        self.driver.add(
            text[:shared] + tail,
            seed=seed,
            max_tokens=max_tokens,
            eos=eos,
            priority=priority,
            salt=salt,
            resumed=resumed,
            logprobs=logprobs,
        )

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(self.driver.live)))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def error(self, data: st.DataObject) -> None:
        self.driver.error(data.draw(st.sampled_from(self.driver.live)))

    @precondition(lambda self: len(self.driver.plans) < self.driver.setup.depth)
    @rule(twice=st.booleans())
    def schedule(self, twice: bool) -> None:
        self.driver.executor.apply_twice = twice
        self.driver.schedule()

    @precondition(lambda self: self.driver.plans)
    @rule()
    def retire(self) -> None:
        self.driver.retire()

    @precondition(lambda self: self.driver.plans)
    @rule(last=st.booleans())
    def fail(self, last: bool) -> None:
        self.driver.fail(-1 if last else 0)

    @precondition(lambda self: self.driver.live)
    @rule(steps=st.integers(1, 20))
    def run(self, steps: int) -> None:
        """Long stretches in which nothing happens but work."""
        for _ in range(steps):
            while len(self.driver.plans) < self.driver.setup.depth and self.driver.schedule():
                pass
            if self.driver.plans:
                self.driver.retire()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


def assert_machine_holds(max_examples: int) -> None:
    """Run so many stories."""
    options = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(SchedulerMachine, settings=options)


def test_any_story_ends_well() -> None:
    """A short search."""
    assert_machine_holds(60)


@pytest.mark.slow
def test_any_of_many_stories_ends_well() -> None:
    """A longer one."""
    assert_machine_holds(2_000)
