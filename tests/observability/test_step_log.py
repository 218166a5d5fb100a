"""The ring of steps, what counts as slow, and what the watchdog does about it. Time is a number here."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from octavo.observability.step_log import NUM_STEPS, StepLog
from octavo.observability.watchdog import Watchdog, look


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_step(log: StepLog, clock: Clock, seconds: float, tokens: int = 8) -> None:
    log.begin(log.count + 1, clock.now, tokens=tokens, rows=2, sampled=1)
    clock.now += seconds
    assert log.end(waiting=3, preemptions=0) == pytest.approx(seconds)


def make_log(steps: int = 0, seconds: float = 0.006, tokens: int = 8) -> tuple[StepLog, Clock]:
    clock = Clock()
    log = StepLog(clock)
    for _ in range(steps):
        run_step(log, clock, seconds, tokens)
    return log, clock


def test_a_step_is_recorded_whole() -> None:
    log, clock = make_log()
    assert (log.last_end, log.last()) == (None, [])
    log.begin(7, clock.now, tokens=5, rows=4, sampled=3)
    assert log.current is not None
    clock.now += 0.25
    log.end(waiting=2, preemptions=1)
    (record,) = log.last()
    assert (record.step, record.start, record.seconds) == (7, 100.0, 0.25)
    assert (record.tokens, record.rows, record.sampled) == (5, 4, 3)
    assert (record.waiting, record.preemptions, record.stacks) == (2, 1, ())
    assert (log.current, log.last_end, log.count) == (None, 100.25, 1)
    assert log.describe(8) == "7 (250.0 ms, 5 tokens of 4 requests)"


@pytest.mark.parametrize("steps", [1, NUM_STEPS, NUM_STEPS + 1, 2 * NUM_STEPS + 5])
def test_the_ring_holds_the_last_steps(steps: int) -> None:
    log, _ = make_log(steps)
    for count in (1, 3, NUM_STEPS, NUM_STEPS + 1):
        kept = min(count, steps, NUM_STEPS)
        assert [record.step for record in log.last(count)] == list(range(steps - kept + 1, steps + 1))


@pytest.mark.parametrize(
    ("seconds", "tokens", "slow_after"),
    [
        (0.006, 8, 0.1),  # never less than a tenth of a second
        (0.05, 8, 0.5),  # ten times the median
        (0.05, 16, 0.5),  # of steps up to twice the size
        (0.006, 512, 0.006 * 10 * 64),  # a size never seen: in proportion
        (0.5, 5120, 5.0),  # but five seconds are slow for sure
    ],
)
def test_slow_is_what_takes_ten_times_as_long_as_its_like(
    seconds: float, tokens: int, slow_after: float
) -> None:
    log, clock = make_log(50, seconds)
    run_step(log, clock, 30.0)  # one that was slow moves no median
    assert log.slow_after(tokens) == pytest.approx(slow_after)


def test_prefills_are_compared_with_prefills() -> None:
    log, clock = make_log(50, 0.006)
    for _ in range(20):
        run_step(log, clock, 0.4, tokens=512)
    assert log.slow_after(512) == pytest.approx(4.0)
    assert log.slow_after(8) == pytest.approx(0.1)


def test_at_first_nothing_is_slow_for_five_seconds() -> None:
    log, _ = make_log(7)
    assert log.slow_after(8) == 5.0


def slow_function(log: StepLog) -> None:
    look(log)


def test_a_slow_step_leaves_stacks_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    log, clock = make_log(50, 0.03)
    log.begin(51, clock.now, tokens=8, rows=2, sampled=2)
    for seconds, samples in [(0.29, 0), (0.02, 1), (0.28, 1), (0.02, 2), (0.7, 3), (9, 4), (9, 5), (99, 5)]:
        clock.now += seconds
        slow_function(log)
        assert log.current is not None
        assert len(log.current.stacks) == samples
    log.end(waiting=0, preemptions=0)
    stacks = log.last(1)[0].stacks
    assert len(stacks) == 5
    assert all("slow_function" in stack for stack in stacks)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith(
        "step 51 has been running for 0.31 s, where 0.30 s is slow: 8 tokens of 2 requests"
    )
    assert "slow_function" in message
    assert "\n" not in message


def test_nothing_is_said_between_steps_or_of_fast_ones(caplog: pytest.LogCaptureFixture) -> None:
    log, clock = make_log(50)
    clock.now += 1000
    look(log)
    log.begin(51, clock.now, tokens=8, rows=1, sampled=1)
    look(log)
    log.end(waiting=0, preemptions=0)
    assert not caplog.records
    assert log.last(1)[0].stacks == ()


def test_the_watchdog_ends_with_close_and_with_its_log() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "octavo-watchdog"]

    before = len(names())
    log, _ = make_log()
    Watchdog(log).close()
    assert len(names()) == before
    left = Watchdog(log)
    reference = weakref.ref(log)
    del log
    gc.collect()
    left._thread.join(5)
    assert reference() is None
    assert len(names()) == before
