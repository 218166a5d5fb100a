"""The last steps of an engine, always on.

A ring of records, one for each step, overwritten oldest first. What it costs a step is one record and a few
assignments: 0.8 us, measured with `timeit` on `begin` and `end` together. Rule: the engine's thread writes;
any thread may read, and the watchdog's may add stacks to the step under way.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

NUM_STEPS = 4096
#: A step is slow that takes this many times what is usual, and this long in any case.
SLOW_FACTOR = 10
SLOW_SECONDS = 0.1
#: Slow whatever is usual, while too little is known.
_SLOW_FOR_SURE = 5.0
_RECENT = 256
_FEW = 8


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One step. start: seconds of the monotonic clock. waiting: requests left in the queue. preemptions: in
    this step. stacks: of the engine's thread while the step ran, if it was slow."""

    step: int
    start: float
    seconds: float
    tokens: int
    rows: int
    sampled: int
    waiting: int
    preemptions: int
    stacks: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class RunningStep:
    """The step under way. thread: who runs it."""

    step: int
    start: float
    tokens: int
    rows: int
    sampled: int
    thread: int
    stacks: list[str] = field(default_factory=list)


class StepLog:
    """The ring, and the step under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        #: The step under way; None between steps.
        self.current: RunningStep | None = None
        #: When the last step ended; None before the first.
        self.last_end: float | None = None
        #: Steps that ended.
        self.count = 0
        self._ring: list[StepRecord | None] = [None] * NUM_STEPS

    def begin(self, step: int, start: float, *, tokens: int, rows: int, sampled: int) -> None:
        """A step is under way, in the caller's thread."""
        self.current = RunningStep(step, start, tokens, rows, sampled, threading.get_ident())

    def end(self, *, waiting: int, preemptions: int) -> float:
        """The step under way is over; the seconds it took."""
        current, now = self.current, self.clock()
        assert current is not None, "no step is under way"
        self.current = None
        seconds = now - current.start
        self._ring[self.count % NUM_STEPS] = StepRecord(
            step=current.step,
            start=current.start,
            seconds=seconds,
            tokens=current.tokens,
            rows=current.rows,
            sampled=current.sampled,
            waiting=waiting,
            preemptions=preemptions,
            stacks=tuple(current.stacks),
        )
        self.count += 1
        self.last_end = now
        return seconds

    def last(self, count: int = NUM_STEPS) -> list[StepRecord]:
        """The last `count` steps that are remembered, oldest first."""
        end = self.count
        indexes = range(max(0, end - min(count, NUM_STEPS)), end)
        return [record for i in indexes if (record := self._ring[i % NUM_STEPS]) is not None]

    def slow_after(self, tokens: int) -> float:
        """Seconds after which a step of so many tokens is slow.

        SLOW_FACTOR times the median of recent steps of similar size, half to twice the tokens: a prefill is
        no slow decode. Where there are few of these, the median of all counts, in proportion to the tokens.
        """
        recent = self.last(_RECENT)
        alike = [r.seconds for r in recent if r.tokens <= 2 * tokens and tokens <= 2 * r.tokens]
        if len(alike) >= _FEW:
            return max(SLOW_SECONDS, SLOW_FACTOR * statistics.median(alike))
        if len(recent) < _FEW:
            return _SLOW_FOR_SURE
        size = statistics.median(r.tokens for r in recent)
        usual = statistics.median(r.seconds for r in recent) * max(1.0, tokens / size)
        return min(max(SLOW_SECONDS, SLOW_FACTOR * usual), _SLOW_FOR_SURE)

    def describe(self, count: int) -> str:
        """The last steps in words, for an error message."""
        steps = (
            f"{r.step} ({r.seconds * 1e3:.1f} ms, {r.tokens} tokens of {r.rows} requests)"
            for r in self.last(count)
        )
        return ", ".join(steps) or "none"
