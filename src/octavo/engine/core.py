"""The step loop: schedule, execute, sample, update.

Rule: this is the only loop there is. Whoever owns the core calls `step` as long as there are requests,
and everything that happens to a request happens in a step or in `abort`.
"""

from __future__ import annotations

import logging

from octavo.executor.base import Executor
from octavo.messages import EngineOutput, EngineRequest, SchedulerOutput
from octavo.request import FinishReason
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class EngineCore:
    """A scheduler and an executor, stepped by their owner, in one thread."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self._executor = executor

    @property
    def has_requests(self) -> bool:
        """Whether stepping would do anything."""
        return self.scheduler.has_requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request; InvalidRequestError where it can't be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> EngineOutput | None:
        """End a request, wherever it stands; its last output, or None if it is unknown."""
        return self.scheduler.finish(request_id, FinishReason.ABORT)

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it added to each request."""
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        try:
            self._executor.execute(plan)
            result = self._executor.sample()
        except Exception as error:
            return self._give_up(plan, error)
        return self.scheduler.update(result)

    def close(self) -> None:
        """Free the executor."""
        self._executor.close()

    def _give_up(self, plan: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """A step failed: take it back, and end the requests that were in it, with the cause. Those that
        were not go on."""
        logger.exception("step %d failed; its %d requests end", plan.step, len(plan.rows))
        self.scheduler.undo()
        cause = f"the step that computed this request failed: {type(error).__name__}: {error}"
        outputs = (
            self.scheduler.finish(row.request_id, FinishReason.ERROR, error=cause) for row in plan.rows
        )
        return [output for output in outputs if output is not None]
