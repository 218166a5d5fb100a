"""What is told of an engine and of a request: numbers at one moment.

Rule: these are messages. They hold nothing that lives in the engine, so they cross to another process.
"""

from __future__ import annotations

from typing import Self

import msgspec

from octavo.observability.histogram import HistogramCounts


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When things happened to a request, in seconds of the monotonic clock; None: they never did.

    arrival: at the front end. first_scheduled: the first step that it was part of began. first_token: the
    step that gave its first token ended. end: it ended in the engine.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    end: float

    @property
    def queue(self) -> float:
        """Seconds from arrival to the first step, or to the end if there was none."""
        return max(0.0, (self.end if self.first_scheduled is None else self.first_scheduled) - self.arrival)

    @property
    def prefill(self) -> float | None:
        """Seconds from the first step to the first token, or to the end; None if there was no step."""
        if self.first_scheduled is None:
            return None
        return (self.end if self.first_token is None else self.first_token) - self.first_scheduled

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the end; None if there was no token."""
        return None if self.first_token is None else self.end - self.first_token


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """KV blocks by state; each is in one, so free + cached + referenced = total."""

    total: int
    free: int
    cached: int
    referenced: int


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens since the engine started, by where they came from.

    prompt_computed + prompt_cached is what the prompts hold that went through. generated: sampled, whether
    anyone still waited for them or not. recomputed: computed once more, because of a preemption or to resume
    what another engine began.
    """

    prompt_computed: int = 0
    prompt_cached: int = 0
    generated: int = 0
    recomputed: int = 0


class ServerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests to one front end.

    received = open + the sum of ends + the sum of refusals. ends: by FinishReason. refusals: by reason.
    Histograms are of seconds: queue of requests that the engine took, itl of each token but the first, e2e of
    all that were not refused.
    """

    received: int
    open: int
    ends: dict[str, int]
    refusals: dict[str, int]
    queue: HistogramCounts
    ttft: HistogramCounts
    itl: HistogramCounts
    e2e: HistogramCounts

    def __add__(self, other: Self) -> Self:
        """Two front ends together."""
        return msgspec.structs.replace(
            self,
            received=self.received + other.received,
            open=self.open + other.open,
            ends={reason: count + other.ends[reason] for reason, count in self.ends.items()},
            refusals={reason: count + other.refusals[reason] for reason, count in self.refusals.items()},
            queue=self.queue + other.queue,
            ttft=self.ttft + other.ttft,
            itl=self.itl + other.itl,
            e2e=self.e2e + other.e2e,
        )


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core at one moment.

    Gauges are read from queues and pools when asked for. steps, tokens, preemptions, ends: since it started.
    ends: requests that ended in the core, by FinishReason. seconds_since_step: since the last step ended;
    None before the first. step_running: how long the present step has been running; 0 between steps. pid: of
    the process that steps. sizes: entries of internal containers; all 0 when idle. gc_pauses: by generation,
    if the core has a process of its own.
    """

    running: int
    waiting: int
    blocks: BlockCounts
    steps: int
    tokens: TokenCounts
    preemptions: int
    ends: dict[str, int]
    step_seconds: HistogramCounts
    seconds_since_step: float | None
    step_running: float
    pid: int
    sizes: dict[str, int]
    gc_pauses: list[HistogramCounts] = []
