"""Histograms against counting by hand."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from octavo.observability.histogram import PAUSES, SECONDS, Histogram, HistogramCounts

BOUNDS = (0.5, 1.0, 2.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.5, 2.0, 2.1, 99.0]), st.integers(1, 3))))
def test_a_measurement_counts_in_the_first_bucket_that_holds_it(measured: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in measured:
        histogram.observe(value, times)
    values = [value for value, times in measured for _ in range(times)]
    counts = histogram.snapshot()
    below = [sum(value <= bound for value in values) for bound in (*BOUNDS, math.inf)]
    assert [sum(counts.counts[: i + 1]) for i in range(4)] == below
    assert counts.count == len(values)
    assert math.isclose(counts.total, sum(values))


def test_a_snapshot_stays_as_it_was_and_crosses_a_process_boundary() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.1)
    before = histogram.snapshot()
    histogram.observe(0.1)
    assert (before.count, histogram.snapshot().count) == (1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=HistogramCounts) == before


def test_bounds_are_sorted() -> None:
    for bounds in (SECONDS, PAUSES):
        assert sorted(set(bounds)) == list(bounds)
