"""Looks at what a slow step is doing while it does it.

Rule: it only looks. It never stops a step, and costs those that are fast nothing but a thread that wakes
twenty times a second.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import weakref
from types import FrameType

from octavo.observability.step_log import SLOW_SECONDS, RunningStep, StepLog

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_MAX_STACKS = 5


class Watchdog:
    """A thread that samples the stack of whoever runs a slow step; the samples go to the step's record.

    The first sample is taken when the step has become slow, each further one when it has taken twice as
    long. Ends with `close`, or when nobody holds the log any more.
    """

    def __init__(self, log: StepLog) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(log), self._stop), name="octavo-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


def _watch(reference: weakref.ref[StepLog], stop: threading.Event) -> None:
    while not stop.wait(_POLL_SECONDS):
        log = reference()
        if log is None:
            return
        look(log)
        del log  # or waiting would keep it


def look(log: StepLog) -> None:
    """Sample the step under way if it is slow; warn of it the first time."""
    step = log.current
    if step is None or len(step.stacks) >= _MAX_STACKS:
        return
    elapsed = log.clock() - step.start
    if elapsed <= SLOW_SECONDS:
        return
    limit = log.slow_after(step.tokens)
    frame = sys._current_frames().get(step.thread)
    if elapsed <= limit * 2 ** len(step.stacks) or frame is None or log.current is not step:
        return
    if not step.stacks:
        _warn(step, elapsed, limit, frame)
    step.stacks.append("".join(traceback.format_stack(frame)))


def _warn(step: RunningStep, elapsed: float, limit: float, frame: FrameType) -> None:
    inner = traceback.extract_stack(frame, 4)
    where = " < ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in reversed(inner))
    logger.warning(
        "step %d has been running for %.2f s, where %.2f s is slow: %d tokens of %d requests; it is in %s",
        step.step,
        elapsed,
        limit,
        step.tokens,
        step.rows,
        where,
    )
