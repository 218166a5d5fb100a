"""One worker, in this process."""

from __future__ import annotations

from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.runner.model_runner import ModelRunner


class UniprocExecutor:
    """See Executor. Owns the runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, plan: SchedulerOutput) -> None:
        """Run the forward now: the CPU has nothing to overlap it with."""
        self._runner.execute(plan)

    def sample(self) -> ModelRunnerOutput:
        """Sample from the logits of the plan just executed."""
        return self._runner.sample()

    def close(self) -> None:
        """Stop the runner's threads and unmap its weights."""
        self._runner.close()
