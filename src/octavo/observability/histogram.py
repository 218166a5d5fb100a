"""Counts of measurements by size.

Rule: buckets are fixed when a histogram is made, so that its counts can be added and compared at any time.
"""

from __future__ import annotations

import bisect
from typing import Self

import msgspec

#: Upper bounds in seconds, 1-2.5-5: of what lasts from a millisecond to minutes.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
#: Of pauses that should be short.
PAUSES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class HistogramCounts(msgspec.Struct, frozen=True):
    """A histogram at one moment.

    counts[i]: measurements in (bounds[i - 1], bounds[i]]; one more than bounds, the last beyond all of them.
    total: the sum of what was measured.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __add__(self, other: Self) -> Self:
        """What both measured, in the same buckets."""
        assert self.bounds == other.bounds
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return msgspec.structs.replace(self, counts=counts, total=self.total + other.total)

    @property
    def count(self) -> int:
        """Measurements."""
        return sum(self.counts)


class Histogram:
    """A histogram that grows. One writer; `snapshot` may be called from any thread."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a measurement, or several that are equal."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """The counts so far."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)
