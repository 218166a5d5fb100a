"""What a load run's records mean: percentiles, throughput, goodput.

Rule: times and tokens are of requests that were answered whole; the others are counted, by kind, and count
against goodput.

How latencies are defined:

    TTFT   from the request's bytes going out to the first chunk with text.
    ITL    between tokens after the first. A gap between two chunks is one ITL where the server sends a chunk
           for each token. Where usage counts more tokens than there were chunks, each chunk is taken to carry
           its even share: the gap is divided by (tokens - 1) / (chunks - 1). An ending token, which has no
           text, is no token here. So the ITLs of a request always spread its whole decode time.
    E2E    from the request's bytes going out to the end of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from octavo.bench.load_generator import Record, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What a request must meet to be good, in milliseconds; None: whatever. itl: of its mean ITL."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def any(self) -> bool:
        """Whether anything is asked."""
        return (self.ttft_ms, self.itl_ms, self.e2e_ms) != (None, None, None)


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met all objectives: as a share of all requests, and how many a second."""

    share: float
    requests_per_s: float


class ErrorCount(msgspec.Struct, frozen=True):
    """Requests that failed in one way, and what one of them was told."""

    count: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A load run in numbers.

    refusals: answers of 429, also where the request got through later. chunks_as_tokens: requests whose
    tokens had to be counted as chunks, since the server sent no usage. max_late_ms: how long after its
    time a request went out, at most; more than a little says that this program was too slow.
    client_us_per_token, client_cpu_share: the processor time that this program used.
    """

    requests: int
    completed: int
    errors: dict[str, ErrorCount]
    refusals: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    chunks_as_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Latency | None
    itl_ms: Latency | None
    e2e_ms: Latency | None
    goodput: Goodput | None
    max_late_ms: float
    client_us_per_token: float
    client_cpu_share: float


def summarize(run: Run, objectives: Objectives | None = None) -> Summary:
    """The numbers of a run."""
    whole = [record for record in run.records if record.error is None]
    seconds = max(run.ended - run.started, 1e-9)
    output = sum(num_tokens(record) for record in whole)
    prompt = sum(record.prompt_tokens for record in whole)
    return Summary(
        requests=len(run.records),
        completed=len(whole),
        errors=_errors(run.records),
        refusals=sum(record.refusals for record in run.records),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in whole),
        output_tokens=output,
        chunks_as_tokens=sum(record.output_tokens is None for record in whole),
        requests_per_s=len(whole) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        ttft_ms=_latency([value for record in whole if (value := ttft(record)) is not None]),
        itl_ms=_latency([gap for record in whole for gap in itls(record)]),
        e2e_ms=_latency([record.ended - record.sent for record in whole]),
        goodput=_goodput(run.records, objectives, seconds) if objectives and objectives.any else None,
        max_late_ms=1e3 * max((record.late for record in run.records), default=0.0),
        client_us_per_token=1e6 * run.cpu_seconds / max(output, 1),
        client_cpu_share=run.cpu_seconds / seconds,
    )


def num_tokens(record: Record) -> int:
    """The tokens of an answer: as the server counted them, or else its chunks."""
    return len(record.arrivals) if record.output_tokens is None else record.output_tokens


def ttft(record: Record) -> float | None:
    """Seconds to the first text; None if there was none."""
    return record.arrivals[0] - record.sent if record.arrivals else None


def itls(record: Record) -> list[float]:
    """Seconds between tokens, one value for each gap between chunks; see the module."""
    arrivals = record.arrivals
    if len(arrivals) < 2:
        return []
    with_text = num_tokens(record) - (record.finish_reason == "stop")
    share = max(1.0, (with_text - 1) / (len(arrivals) - 1))
    return [(later - earlier) / share for earlier, later in pairwise(arrivals)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of sorted values lies, interpolated between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _latency(seconds: list[float]) -> Latency | None:
    if not seconds:
        return None
    ms = sorted(1e3 * value for value in seconds)
    return Latency(sum(ms) / len(ms), percentile(ms, 0.5), percentile(ms, 0.9), percentile(ms, 0.99), ms[-1])


def _errors(records: list[Record]) -> dict[str, ErrorCount]:
    failed = [record for record in records if record.error is not None]
    counts = Counter(record.error for record in failed)
    examples = {record.error: record.message for record in reversed(failed)}
    return {str(kind): ErrorCount(count, examples[kind]) for kind, count in counts.most_common()}


def _goodput(records: list[Record], objectives: Objectives, seconds: float) -> Goodput:
    good = sum(_is_good(record, objectives) for record in records)
    return Goodput(good / max(len(records), 1), good / seconds)


def _is_good(record: Record, objectives: Objectives) -> bool:
    if record.error is not None:
        return False
    first, gaps = ttft(record), itls(record)
    measured = (
        (first, objectives.ttft_ms),
        (sum(gaps) / len(gaps) if gaps else None, objectives.itl_ms),
        (record.ended - record.sent, objectives.e2e_ms),
    )
    return all(limit is None or value is None or 1e3 * value <= limit for value, limit in measured)
