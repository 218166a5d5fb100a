"""What the engine core asks of whoever runs its plans."""

from __future__ import annotations

from typing import Protocol

from octavo.messages import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans in the order given, on one worker or many.

    `execute` starts a plan's forward; `sample` finishes the oldest plan that was executed. An exception
    from either leaves the workers' state unknown: the scheduler undoes what is in flight, and its next
    plan resets them.
    """

    def execute(self, plan: SchedulerOutput) -> None:
        """Start a plan."""

    def sample(self) -> ModelRunnerOutput:
        """Finish the oldest plan started."""

    def close(self) -> None:
        """Free the workers."""
