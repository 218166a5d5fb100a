"""What records mean, with records whose numbers are known."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.load_generator import Record, Run
from octavo.bench.reports import Goodput, Objectives, itls, percentile, summarize, ttft


def record(sent: float = 1.0, arrivals: tuple[float, ...] = (1.5, 1.7, 2.1), **fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "ended": arrivals[-1] if arrivals else sent,
        "prompt_tokens": 10,
        "output_tokens": len(arrivals),
        "finish_reason": "length",
    }
    return Record(sent=sent, arrivals=list(arrivals), **(defaults | fields))


def run(*records: Record, seconds: float = 10.0) -> Run:
    return Run(list(records), 0.0, seconds, 0.5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_percentiles_are_those_of_numpy(values: list[float], share: float) -> None:
    expected = np.percentile(values, 100 * share)
    assert percentile(sorted(values), share) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_token_a_chunk() -> None:
    assert ttft(record()) == 0.5
    assert itls(record()) == pytest.approx([0.2, 0.4])


def test_several_tokens_a_chunk_share_its_gap() -> None:
    gaps = itls(record(output_tokens=7))
    assert gaps == pytest.approx([0.2 / 3, 0.4 / 3])
    # Each of the two gaps stands for three tokens, and they fill the time of decoding.
    assert 3 * sum(gaps) == pytest.approx(2.1 - 1.5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"output_tokens": 4, "finish_reason": "stop"}, [0.2, 0.4]),  # the fourth ended the answer
        ({"output_tokens": 2}, [0.2, 0.4]),
        ({"output_tokens": None}, [0.2, 0.4]),
        ({"arrivals": (1.5,)}, []),
        ({"arrivals": ()}, []),
    ],
)
def test_itls_in_special_cases(fields: dict[str, Any], expected: list[float]) -> None:
    assert itls(record(**fields)) == pytest.approx(expected)


def test_a_summary() -> None:
    records = [
        record(),
        record(sent=2.0, arrivals=(2.25, 2.35), output_tokens=None, prompt_tokens=0, late=0.003),
        record(error="refused", message="queue full", refusals=1),
        record(error="refused", message="still full", refusals=2),
        record(error="cut", message="gone"),
        record(refusals=1, cached_tokens=4),
    ]
    summary = summarize(run(*records))
    assert (summary.requests, summary.completed, summary.refusals) == (6, 3, 4)
    assert {kind: (e.count, e.example) for kind, e in summary.errors.items()} == {
        "refused": (2, "queue full"),
        "cut": (1, "gone"),
    }
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 4, 8)
    assert summary.chunks_as_tokens == 1
    assert summary.requests_per_s == pytest.approx(0.3)
    assert summary.output_tokens_per_s == pytest.approx(0.8)
    assert summary.total_tokens_per_s == pytest.approx(2.8)
    assert summary.max_late_ms == pytest.approx(3.0)
    assert summary.client_cpu_share == pytest.approx(0.05)
    assert summary.client_us_per_token == pytest.approx(62_500)
    assert summary.goodput is None
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(1e3 * statistics.mean([0.5, 0.25, 0.5]))
    assert summary.itl_ms is not None
    assert (summary.itl_ms.p50, summary.itl_ms.max) == pytest.approx((200, 400))
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.max == pytest.approx(1100)


def test_nothing_was_answered() -> None:
    summary = summarize(run(record(error="no connection", message="m")), Objectives(ttft_ms=1))
    assert (summary.completed, summary.ttft_ms, summary.itl_ms, summary.e2e_ms) == (0, None, None, None)
    assert summary.goodput == Goodput(0.0, 0.0)
    assert summarize(run()).requests == 0


@pytest.mark.parametrize(
    ("objectives", "share"),
    [
        (Objectives(ttft_ms=500), 0.75),
        (Objectives(ttft_ms=499), 0.25),
        (Objectives(itl_ms=301), 0.5),  # the mean of 200 and 400
        (Objectives(itl_ms=299), 0.25),
        (Objectives(e2e_ms=1100), 0.5),
        (Objectives(ttft_ms=500, itl_ms=1000, e2e_ms=1099), 0.25),
    ],
    ids=str,
)
def test_goodput(objectives: Objectives, share: float) -> None:
    records = [
        record(sent=1.0, arrivals=(1.5, 1.7, 2.1)),
        record(sent=1.0, arrivals=(1.25,)),  # no gap: no ITL to miss
        record(sent=1.0, arrivals=(1.5, 2.5)),
        record(error="cut"),
    ]
    summary = summarize(run(*records), objectives)
    assert summary.goodput == Goodput(share, pytest.approx(share * 4 / 10))
