"""What the core remembers of requests so that its numbers add up: when things happened, what was counted.

Rule: it reads requests and plans, and writes nothing but itself. A token is counted when the step that
computed it has retired; a step that failed computed nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec

from octavo.messages import EngineOutput, EngineRequest, SchedulerOutput
from octavo.observability.stats import RequestTimes, TokenCounts
from octavo.request import FinishReason, Request


@dataclass(slots=True, eq=False)
class _Entry:
    """One request under way. num_known: tokens that it came with. high: positions [0, high) were computed,
    or found in the cache, at least once."""

    request: Request
    num_known: int
    high: int = 0
    counted: bool = False  # the tokens found in the cache
    first_scheduled: float | None = None
    first_token: float | None = None


class Ledger:
    """Times of requests under way, and totals since the engine started."""

    def __init__(self) -> None:
        self.ends: Counter[FinishReason] = Counter()
        self._entries: dict[str, _Entry] = {}
        self._prompt_computed = self._prompt_cached = self._generated = self._recomputed = 0

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._entries)

    @property
    def tokens(self) -> TokenCounts:
        """Tokens by where they came from."""
        return TokenCounts(
            prompt_computed=self._prompt_computed,
            prompt_cached=self._prompt_cached,
            generated=self._generated,
            recomputed=self._recomputed,
        )

    def add(self, message: EngineRequest, request: Request) -> None:
        """The scheduler took a request."""
        known = len(message.prompt_ids) + len(message.output_ids)
        self._entries[message.request_id] = _Entry(request, known)

    def planned(self, plan: SchedulerOutput, now: float) -> None:
        """A step begins."""
        for new in plan.new_rows:
            entry = self._entries[new.request_id]
            if entry.first_scheduled is None:
                entry.first_scheduled = now

    def retired(self, plan: SchedulerOutput) -> None:
        """A step computed its tokens. Call before `close` for those that it ended."""
        for row in plan.rows:
            entry = self._entries.get(row.request_id)
            if entry is not None:  # not aborted meanwhile
                self._count(entry, row.start, row.start + row.num_tokens)

    def close(self, outputs: list[EngineOutput], now: float) -> list[EngineOutput]:
        """The outputs, with times and preemptions on those that end a request."""
        return [self._close(output, now) for output in outputs]

    def _close(self, output: EngineOutput, now: float) -> EngineOutput:
        entry = self._entries[output.request_id]
        if output.new_token_ids:
            self._generated += len(output.new_token_ids)
            if entry.first_token is None:
                entry.first_token = now
        if output.finish_reason is None:
            return output
        del self._entries[output.request_id]
        self._count_cached(entry)
        self.ends[output.finish_reason] += 1
        times = RequestTimes(
            arrival=entry.request.arrival,
            first_scheduled=entry.first_scheduled,
            first_token=entry.first_token,
            end=now,
        )
        return msgspec.structs.replace(output, times=times, num_preemptions=entry.request.num_preemptions)

    def _count(self, entry: _Entry, start: int, end: int) -> None:
        self._count_cached(entry)
        fresh = max(start, entry.high)
        if fresh < entry.num_known:
            prompt = len(entry.request.prompt_ids)
            self._prompt_computed += max(0, min(end, prompt) - fresh)
            self._recomputed += max(0, min(end, entry.num_known) - max(fresh, prompt))
        self._recomputed += max(0, min(end, entry.high) - start)
        entry.high = max(entry.high, end)

    def _count_cached(self, entry: _Entry) -> None:
        if not entry.counted:
            entry.counted = True
            entry.high = entry.request.num_cached_tokens
            self._prompt_cached += min(entry.high, len(entry.request.prompt_ids))
