"""The step loop: schedule, execute, sample, update.

Rule: this is the only loop there is. Whoever owns the core calls `step` as long as there are requests,
and everything that happens to a request happens in a step or in `abort`. Time comes from the clock given.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from octavo.engine.ledger import Ledger
from octavo.executor.base import Executor
from octavo.messages import EngineOutput, EngineRequest, ModelRunnerOutput, SchedulerOutput
from octavo.observability.histogram import Histogram
from octavo.observability.stats import EngineStats
from octavo.observability.step_log import StepLog
from octavo.observability.watchdog import Watchdog
from octavo.request import FinishReason
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_STEPS_TO_TELL = 8
_PATIENCE_SECONDS = 1.0


class EngineCore:
    """A scheduler and an executor, stepped by their owner, in one thread. `stats` alone may be called from
    others.

    clock: seconds that only grow; arrivals of requests are told by the same.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.scheduler = scheduler
        #: The last steps.
        self.steps = StepLog(clock)
        self._executor = executor
        self._clock = clock
        self._ledger = Ledger()
        self._step_seconds = Histogram()
        self._watchdog = Watchdog(self.steps)
        #: Held while the scheduler changes, not while a step computes: who asks for numbers waits for
        #: microseconds, and gets some that belong together.
        self._lock = threading.Lock()

    @property
    def has_requests(self) -> bool:
        """Whether stepping would do anything."""
        return self.scheduler.has_requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request; InvalidRequestError where it can't be served."""
        with self._lock:
            self.scheduler.add(request)
            taken = self.scheduler.request(request.request_id)
            assert taken is not None
            self._ledger.add(request, taken)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request, wherever it stands; its last output, or None if it is unknown."""
        with self._lock:
            output = self.scheduler.finish(request_id, FinishReason.ABORT)
            return None if output is None else self._ledger.close([output], self._clock())[0]

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it added to each request."""
        started, preemptions = self._clock(), self.scheduler.num_preemptions
        with self._lock:
            plan = self.scheduler.schedule()
            if plan is None:
                return []
            self._ledger.planned(plan, started)
        self.steps.begin(
            plan.step, started, tokens=plan.num_tokens, rows=len(plan.rows), sampled=plan.num_sampled
        )
        try:
            return self._run(plan)
        finally:
            preemptions = self.scheduler.num_preemptions - preemptions
            seconds = self.steps.end(waiting=self.scheduler.num_waiting, preemptions=preemptions)
            self._step_seconds.observe(seconds)

    def stats(self) -> EngineStats:
        """The core at this moment. Any thread may ask, also while a step runs, or hangs."""
        patient = self._lock.acquire(timeout=_PATIENCE_SECONDS)
        try:
            return self._stats()
        finally:
            if patient:
                self._lock.release()

    def close(self) -> None:
        """Free the executor."""
        self._watchdog.close()
        self._executor.close()

    def _run(self, plan: SchedulerOutput) -> list[EngineOutput]:
        result: ModelRunnerOutput | Exception
        try:
            self._executor.execute(plan)
            result = self._executor.sample()
        except Exception as error:
            result = error
        with self._lock:
            if isinstance(result, Exception):
                outputs = self._give_up(plan, result)
            else:
                outputs = self.scheduler.update(result)
                self._ledger.retired(plan)
            return self._ledger.close(outputs, self._clock())

    def _give_up(self, plan: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """A step failed: take it back, and end the requests that were in it, with the cause. Those that
        were not go on."""
        logger.error(
            "step %d failed; its %d requests end. The steps before it: %s",
            plan.step,
            len(plan.rows),
            self.steps.describe(_STEPS_TO_TELL),
            exc_info=error,
        )
        self.scheduler.undo()
        cause = f"the step that computed this request failed: {type(error).__name__}: {error}"
        outputs = (
            self.scheduler.finish(row.request_id, FinishReason.ERROR, error=cause) for row in plan.rows
        )
        return [output for output in outputs if output is not None]

    def _stats(self) -> EngineStats:
        now, current, last_end = self._clock(), self.steps.current, self.steps.last_end
        scheduler = self.scheduler
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks=scheduler.kv.pool.count(),
            steps=self.steps.count,
            tokens=self._ledger.tokens,
            preemptions=scheduler.num_preemptions,
            ends={reason.value: self._ledger.ends[reason] for reason in FinishReason},
            step_seconds=self._step_seconds.snapshot(),
            seconds_since_step=None if last_end is None else max(0.0, now - last_end),
            step_running=0.0 if current is None else max(0.0, now - current.start),
            pid=os.getpid(),
            sizes={"ledger": len(self._ledger), **scheduler.sizes(), **scheduler.kv.sizes()},
        )
