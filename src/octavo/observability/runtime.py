"""Pauses of this process that are nobody's request: the garbage collector's and the event loop's.

Rule: measured where they happen, read when asked for.
"""

from __future__ import annotations

import asyncio
import gc
import time

from octavo.observability.histogram import PAUSES, Histogram, HistogramCounts

#: Container objects that may be made, less those that died, before the youngest are walked; after how many
#: times the middle ones are, too, and after how many of these all. Walking an object costs the same whenever
#: it is done, so a larger first number saves nothing and makes longer pauses: 1 ms with this one, measured at
#: 24 streams with logprobs. Full walks are a matter of minutes, for cycles that lived long.
_THRESHOLDS = (2_000, 10, 100)
_LAG_SECONDS = 0.1


def settle_garbage_collector() -> None:
    """Tell the collector that what is there now stays: call it once, when everything is loaded.

    A full collection walks all objects and stalls every stream: 215 ms with SmolLM2 loaded, measured. Frozen
    objects are not walked; what is left are the requests under way, 1 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


class GCWatch:
    """Times this process's garbage collections, by generation, until `close`."""

    def __init__(self) -> None:
        self._pauses = [Histogram(PAUSES) for _ in range(3)]
        self._started = 0.0
        gc.callbacks.append(self._observe)

    def close(self) -> None:
        """Measure no more."""
        gc.callbacks.remove(self._observe)

    def snapshot(self) -> list[HistogramCounts]:
        """Pauses in seconds, youngest generation first."""
        return [pauses.snapshot() for pauses in self._pauses]

    def _observe(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self._pauses[info["generation"]].observe(time.perf_counter() - self._started)


class LoopWatch:
    """Measures how late the running event loop is: it asks to be called and looks when it was."""

    def __init__(self) -> None:
        self._lags = Histogram(PAUSES)
        self._loop = asyncio.get_running_loop()
        self._plan()

    def close(self) -> None:
        """Measure no more."""
        self._timer.cancel()

    def snapshot(self) -> HistogramCounts:
        """Seconds between when a callback was due and when it ran."""
        return self._lags.snapshot()

    def _plan(self) -> None:
        self._due = self._loop.time() + _LAG_SECONDS
        self._timer = self._loop.call_at(self._due, self._arrive)

    def _arrive(self) -> None:
        self._lags.observe(max(0.0, self._loop.time() - self._due))
        self._plan()
