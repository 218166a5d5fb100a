"""What became of each request: one record in the log and one count, always.

A request is *received*, then it ends in exactly one way: refused, or by its finish reason. A request is over
when its caller has its last output, or left, and the engine's last output has come, which brings its times.

    admitting    refused -> record                    (what is wrong raises before the stream begins)
    took         the stream was made; it may never begin
    begin        open
    deliver      what the engine says; the last output may come before or after `end`
    end          the caller is served or gone -> record, now or with the engine's last output

Rule: lives in the event loop's thread. Where a request comes from is in a context variable, so that nothing
between the server and this log has to hand it on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.request_record import HTTP_REASONS, REFUSALS, RequestRecord, milliseconds, reason_of, write
from octavo.errors import OctavoError
from octavo.messages import EngineOutput, EngineRequest
from octavo.observability.histogram import Histogram
from octavo.observability.stats import ServerStats
from octavo.outputs import RequestOutput
from octavo.request import FinishReason


@dataclass(slots=True)
class Origin:
    """The HTTP request behind engine requests. handled: whether this log knows of it. unstarted: requests
    that were taken from it and whose stream has not begun, by id."""

    endpoint: str
    arrival: float
    handled: bool = False
    unstarted: dict[str, EngineRequest] = field(default_factory=dict)


#: Set by the server for as long as it serves an HTTP request.
origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


@dataclass(slots=True, eq=False)
class _Open:
    """A request that is not over."""

    request: EngineRequest
    source: Origin | None
    first_token: float | None = None
    last_token: float = 0.0
    cached: int = 0
    completion: int = 0
    generated: int = 0
    reason: FinishReason = FinishReason.ABORT  # unless something better is heard of
    error: str | None = None
    ended: float | None = None  # when the caller was served or gone
    final: EngineOutput | None = None  # the engine's last output


class RequestLog:
    """Counts, times and records of one engine's requests."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._open: dict[str, _Open] = {}
        self._received = 0
        self._ends: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._queue, self._ttft, self._itl, self._e2e = (Histogram() for _ in range(4))

    def __len__(self) -> int:
        """Requests that are not over."""
        return len(self._open)

    def stats(self) -> ServerStats:
        """The counts at this moment."""
        return ServerStats(
            received=self._received,
            open=len(self._open),
            ends={reason.value: self._ends[reason] for reason in FinishReason},
            refusals={reason: self._refusals[reason] for reason in REFUSALS},
            queue=self._queue.snapshot(),
            ttft=self._ttft.snapshot(),
            itl=self._itl.snapshot(),
            e2e=self._e2e.snapshot(),
        )

    # -- before the stream ----------------------------------------------------------------------

    @contextmanager
    def admitting(self) -> Iterator[float]:
        """When the request came, while it is looked at: what is raised refuses it."""
        source = origin.get()
        try:
            yield time.monotonic() if source is None else source.arrival
        except OctavoError as error:
            if source is not None:
                source.handled = True
            self._refuse(reason_of(error), str(error), source)
            raise

    def took(self, request: EngineRequest) -> EngineRequest:
        """A stream was made for a request."""
        source = origin.get()
        if source is not None:
            source.handled = True
            source.unstarted[request.request_id] = request
        return request

    # -- the stream -----------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> None:
        """A request's stream begins."""
        source = origin.get()
        if source is not None:
            source.unstarted.pop(request.request_id, None)
        self._received += 1
        self._open[request.request_id] = _Open(request, source)

    def deliver(self, outputs: Iterable[EngineOutput]) -> None:
        """What the engine says, before the caller hears of it."""
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is None:
                continue
            entry.generated += len(output.new_token_ids)
            entry.cached = max(entry.cached, output.num_cached_tokens)
            if output.finish_reason is not None:
                entry.final = output
                if entry.ended is not None:
                    self._close(output.request_id)

    def advance(self, output: RequestOutput) -> None:
        """The caller gets an output."""
        entry, now = self._open[output.request_id], time.monotonic()
        new = len(output.new_token_ids)
        if new and entry.first_token is None:
            entry.first_token = now
            self._ttft.observe(now - entry.request.arrival)
        elif new:
            self._itl.observe((now - entry.last_token) / new, new)
        if new:
            entry.last_token = now
        entry.completion = output.num_tokens
        if output.finish_reason is not None:
            entry.reason, entry.error = output.finish_reason, output.error

    def fail(self, request_id: str, error: Exception) -> None:
        """The caller gets an error instead of its next output."""
        entry = self._open[request_id]
        entry.reason, entry.error = FinishReason.ERROR, str(error)

    def end(self, request_id: str, *, final_coming: bool) -> None:
        """The caller is served, or gone. final_coming: the engine will still say its last output."""
        entry = self._open[request_id]
        entry.ended = time.monotonic()
        if entry.final is not None or not final_coming:
            self._close(request_id)

    def flush(self) -> None:
        """No last output will come for requests that have ended: the engine that had them is gone."""
        for request_id in [name for name, entry in self._open.items() if entry.ended is not None]:
            self._close(request_id)

    # -- after the HTTP request -----------------------------------------------------------------

    def settle(self, source: Origin, status: int, error: str | None = None) -> None:
        """An HTTP request is over. Streams that never began were aborted; what never got as far as the
        engine was refused, by its status, or failed. status: 0 where no answer was begun."""
        for request in source.unstarted.values():
            self._end_early(source, FinishReason.ABORT, request=request)
        source.unstarted.clear()
        if source.handled or 0 < status < 400:
            return
        source.handled = True
        if error is not None or (status >= 500 and status not in HTTP_REASONS):
            self._end_early(source, FinishReason.ERROR, error=error)
        else:
            self._refuse(HTTP_REASONS.get(status or 499, "other"), None, source)

    # -- parts ----------------------------------------------------------------------------------

    def _refuse(self, reason: str, error: str | None, source: Origin | None) -> None:
        self._received += 1
        self._refusals[reason] += 1
        elapsed = 0.0 if source is None else time.monotonic() - source.arrival
        self._write(source, reason="refused", refusal=reason, e2e_ms=milliseconds(elapsed), error=error)

    def _end_early(
        self,
        source: Origin,
        reason: FinishReason,
        *,
        request: EngineRequest | None = None,
        error: str | None = None,
    ) -> None:
        """A request ended that the engine never saw."""
        self._received += 1
        elapsed = time.monotonic() - source.arrival
        self._count_end(reason, elapsed)
        self._write(
            source,
            id=None if request is None else request.request_id,
            reason=reason,
            e2e_ms=milliseconds(elapsed),
            prompt_tokens=None if request is None else len(request.prompt_ids),
            error=error,
        )

    def _close(self, request_id: str) -> None:
        entry = self._open.pop(request_id)
        assert entry.ended is not None
        arrival, final = entry.request.arrival, entry.final
        times = None if final is None else final.times
        self._count_end(entry.reason, entry.ended - arrival)
        if times is not None:
            self._queue.observe(times.queue)
        self._write(
            entry.source,
            id=request_id,
            reason=entry.reason,
            queue_ms=None if times is None else milliseconds(times.queue),
            prefill_ms=None if times is None else milliseconds(times.prefill),
            decode_ms=None if times is None else milliseconds(times.decode),
            ttft_ms=None if entry.first_token is None else milliseconds(entry.first_token - arrival),
            e2e_ms=milliseconds(entry.ended - arrival),
            prompt_tokens=len(entry.request.prompt_ids),
            cached_tokens=entry.cached,
            completion_tokens=entry.completion,
            generated_tokens=entry.generated,
            preemptions=0 if final is None else final.num_preemptions,
            error=entry.error,
        )

    def _count_end(self, reason: FinishReason, seconds: float) -> None:
        self._ends[reason] += 1
        self._e2e.observe(seconds)

    def _write(self, source: Origin | None, **fields: Any) -> None:
        endpoint = "" if source is None else source.endpoint
        write(RequestRecord(endpoint=endpoint, model=self._model, **fields))
