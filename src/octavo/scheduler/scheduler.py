"""Who gets how many tokens in the next step.

There is no prefill phase and no decode phase: each step gives every chosen request some number of
tokens out of one budget, running requests first, then waiting ones.

Steps may be in flight while the next is planned, so two counters run apart (see `Request`):
`schedule` moves num_scheduled_tokens, `update` moves num_computed_tokens. A plan that failed is taken
back by `undo`. Rule: this class is the only writer of requests and queues; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.errors import InvalidRequestError
from octavo.kv_cache.manager import KVCacheManager, PrefixMatch
from octavo.messages import (
    EngineOutput,
    EngineRequest,
    ModelRunnerOutput,
    NewRow,
    PromptLogprobs,
    RowStep,
    SampledToken,
    SchedulerOutput,
    TokenLogprobs,
)
from octavo.request import FinishReason, Request, RequestStatus
from octavo.scheduler.policy import Policy, choose_victim, order_key
from octavo.scheduler.queues import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The most that one step may hold."""

    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def max_logits(self) -> int:
        """Rows of logits: one for each request to sample from, and what is left for logprobs of prompts."""
        return self.max_num_seqs


@dataclass(slots=True)  # frozen ones take three times as long to make
class _Scheduled:
    """A request's part of a plan, and what undoing it needs. Not changed."""

    request: Request
    row: RowStep
    epoch: int  # num_preemptions when it was planned: tells whether its KV is still the request's
    admitted: bool  # this plan took it out of the waiting queue


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int  # tokens that it may still take
    logits: int  # rows of logits that it may still take
    parts: dict[str, _Scheduled] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: SchedulerOutput
    parts: list[_Scheduled]


class Scheduler:
    """Plans steps over one KV pool.

    Call order: `schedule` any number of times, then `update` with the results in the same order; or
    `undo`, which takes back everything still in flight.

    rope_boundary: requests of more tokens than this are rotated otherwise, from their first token on; one
    that grows past it gives up its blocks and computes them anew.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        *,
        policy: Policy = Policy.FCFS,
        rope_boundary: int | None = None,
    ) -> None:
        self.kv = kv
        self.limits = limits
        self._rope_boundary = rope_boundary
        self._policy = policy
        self._key = order_key(policy)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._key)
        self._running: list[Request] = []
        self._in_flight: deque[_InFlight] = deque()
        self._step = 0
        self._num_added = 0
        self._num_preemptions = 0
        self._known_rows: set[str] = set()  # requests whose state the runner holds
        self._dropped: list[str] = []
        self._reset = False

    # -- questions ----------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans given out and neither updated nor undone."""
        return len(self._in_flight)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost its blocks to another."""
        return self._num_preemptions

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._running or self._waiting)

    def request(self, request_id: str) -> Request | None:
        """An unfinished request, to look at."""
        return self._requests.get(request_id)

    def sizes(self) -> dict[str, int]:
        """Entries of internal containers: all 0 when idle."""
        return {"scheduler_requests": len(self._requests), "runner_rows": len(self._known_rows)}

    # -- requests come and go -----------------------------------------------------------------

    def add(self, message: EngineRequest) -> None:
        """Queue a request. InvalidRequestError if its id is taken, there is nothing to compute, or it
        could never fit the pool."""
        if message.request_id in self._requests:
            raise InvalidRequestError(f"request id {message.request_id!r} is in use", param="request_id")
        max_tokens = message.params.max_tokens
        assert max_tokens is not None, "InputProcessor fills in max_tokens"
        if not message.prompt_ids:
            raise InvalidRequestError("the prompt has no tokens; send at least one", param="prompt")
        length = len(message.prompt_ids) + max_tokens
        needed, total = self.kv.blocks_for(length), self.kv.pool.num_blocks
        if needed > total:
            raise InvalidRequestError(
                f"prompt ({len(message.prompt_ids)}) and max_tokens ({max_tokens}) need {needed} KV blocks, "
                f"but there are {total}; ask for fewer tokens, or start with more --kv-cache-gib",
                param="max_tokens",
            )
        request = Request(
            request_id=message.request_id,
            prompt_ids=list(message.prompt_ids),
            output_ids=list(message.output_ids),
            params=message.params,
            max_tokens=max_tokens,
            stop_ids=frozenset(message.eos_ids) | frozenset(message.params.stop_token_ids),
            priority=message.priority,
            arrival=message.arrival,
            sequence=self._num_added,
            cache_salt=message.cache_salt,
        )
        if request.output_ids and _reason_to_stop(request, request.output_ids[-1]) is not None:
            raise InvalidRequestError(
                f"output_ids ends with {request.output_ids[-1]}, number {len(request.output_ids)} of at most "
                f"{max_tokens}: the request is complete, resume only what is not",
                param="output_ids",
            )
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def finish(
        self, request_id: str, reason: FinishReason, *, error: str | None = None
    ) -> EngineOutput | None:
        """End a request from outside: an abort, or an error that is its own fault. None if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._end(request, reason, error=error)
        return self._output(request)

    # -- planning -----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step; None when there is nothing that could run now."""
        draft = _Draft(self.limits.max_num_batched_tokens, self.limits.max_logits)
        short_of_blocks = False
        running = sorted(self._running, key=self._key)
        # Each request that comes later can take a row of logits, also one that is about to be admitted.
        reserved = len(running) + (len(self._waiting) > 0 and len(running) < self.limits.max_num_seqs)
        for request in running:
            reserved -= 1
            if request.status is RequestStatus.RUNNING:  # not preempted by an earlier one meanwhile
                served = self._schedule_running(
                    request, draft, max_logits=draft.logits - reserved, may_allocate=not short_of_blocks
                )
                short_of_blocks |= not served
        if not short_of_blocks:
            self._schedule_waiting(draft)
        if not draft.parts:
            return None
        return self._make_plan(list(draft.parts.values()))

    def _schedule_running(
        self, request: Request, draft: _Draft, *, max_logits: int, may_allocate: bool
    ) -> bool:
        """Give a running request what the budget allows, preempting others for blocks if need be.

        False when it waits for blocks that steps in flight still use: whoever comes after it must
        not take them (may_allocate), or the first in order could wait for ever.
        """
        count = min(draft.budget, request.num_unscheduled_tokens)
        count = _fit(request, request.num_scheduled_tokens, count, max_logits)
        if count == 0 or _ends_in_flight(request):
            return True
        if self._needs_long_rope(request) and not request.long_rope:
            self._preempt(request)
            return True
        end = request.num_scheduled_tokens + count
        missing = self.kv.num_missing(request, end)
        if missing and not may_allocate:
            return True
        while missing and not self.kv.grow(request, end):
            if self.kv.num_retiring and self.kv.num_available + self.kv.num_retiring >= missing:
                return False
            victim = choose_victim(self._running, self._key, self.kv.num_lost_tokens)
            if victim is None:
                return False
            self._take_from_plan(victim, draft)
            self._preempt(victim)
            if victim is request:
                return True
        self._put_into_plan(request, count, draft, admitted=False)
        return True

    def _schedule_waiting(self, draft: _Draft) -> None:
        for request in self._waiting:
            if not draft.budget or len(self._running) >= self.limits.max_num_seqs:
                return
            if request.num_steps_in_flight:
                return  # preempted, and a result is still coming; no one else takes what it lost
            self._choose_rope(request)
            match = self.kv.match_prefix(request)
            if self.kv.awaits_another(request, match):
                continue
            if not self._has_room(request, match):
                return
            count = min(draft.budget, request.num_tokens - match.num_tokens)
            count = _fit(request, match.num_tokens, count, draft.logits)
            if count == 0:
                return
            self._admit(request, match)
            grown = self.kv.grow(request, match.num_tokens + count)
            assert grown, "_has_room promised blocks"
            self._put_into_plan(request, count, draft, admitted=True)

    def _needs_long_rope(self, request: Request) -> bool:
        """Whether the tokens known, or being sampled, are more than the model's original context."""
        return (
            self._rope_boundary is not None and request.num_tokens + request.num_pending > self._rope_boundary
        )

    def _choose_rope(self, request: Request) -> None:
        """By the tokens known now, whatever was computed before: so that a retried request gets the same."""
        if request.long_rope != self._needs_long_rope(request):
            request.long_rope = not request.long_rope
            self.kv.forget(request)  # the hashes of its blocks are others

    def _has_room(self, request: Request, match: PrefixMatch) -> bool:
        """Whether the known tokens of a waiting request fit beside what running ones still need for
        theirs. Admitting less would only preempt it again."""
        held = sum(b is not None for group in match.blocks for b in group)
        needed = self.kv.blocks_for(request.num_tokens) - held + match.num_unreferenced
        promised = sum(
            max(0, self.kv.blocks_for(other.num_tokens) - self.kv.num_held(other)) for other in self._running
        )
        return needed + promised <= self.kv.num_available

    def _admit(self, request: Request, match: PrefixMatch) -> None:
        self._waiting.remove(request)
        self._running.append(request)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = match.num_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_scheduled_tokens = match.num_tokens
        self.kv.admit(request, match)

    def _put_into_plan(self, request: Request, count: int, draft: _Draft, *, admitted: bool) -> None:
        start = request.num_scheduled_tokens
        row = RowStep(
            request_id=request.request_id,
            start=start,
            num_tokens=count,
            block_writes=self._block_writes(request, start),
            samples=_samples(request, start + count),
            prompt_logits=_prompt_logits(request, start, start + count),
            long_rope=request.long_rope,
        )
        draft.parts[request.request_id] = _Scheduled(request, row, request.num_preemptions, admitted)
        draft.budget -= count
        draft.logits -= row.num_logits
        request.num_scheduled_tokens += count
        request.num_steps_in_flight += 1
        request.num_pending += row.samples

    def _take_from_plan(self, request: Request, draft: _Draft) -> None:
        part = draft.parts.pop(request.request_id, None)
        if part is not None:
            draft.budget += part.row.num_tokens
            draft.logits += part.row.num_logits
            self._revert_counters(part)

    def _revert_counters(self, part: _Scheduled) -> None:
        part.request.num_steps_in_flight -= 1
        part.request.num_pending -= part.row.samples
        if part.request.num_preemptions == part.epoch:
            part.request.num_scheduled_tokens = part.row.start

    def _preempt(self, request: Request) -> None:
        """Dereference a request's blocks and let it wait again. Its blocks stay cached until evicted,
        so resuming costs what is really gone."""
        self.kv.free(request)
        self._running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        request.progress_since_preemption = 0
        request.num_computed_tokens = request.num_scheduled_tokens = 0
        self._drop_row(request)
        self._waiting.add(request)

    def _drop_row(self, request: Request) -> None:
        if request.request_id in self._known_rows:
            self._known_rows.remove(request.request_id)
            self._dropped.append(request.request_id)

    def _make_plan(self, parts: list[_Scheduled]) -> SchedulerOutput:
        self._step += 1
        self.kv.launch(self._step)
        new_rows = []
        for part in parts:
            request_id = part.request.request_id
            if request_id not in self._known_rows:
                self._known_rows.add(request_id)
                new_rows.append(_new_row(part.request))
        rows = [part.row for part in parts]
        plan = SchedulerOutput(
            step=self._step,
            reset=self._reset,
            dropped=self._dropped,
            new_rows=new_rows,
            rows=rows,
            num_tokens=sum(row.num_tokens for row in rows),
        )
        self._dropped, self._reset = [], False
        self._in_flight.append(_InFlight(plan, parts))
        return plan

    def _block_writes(self, request: Request, start: int) -> list[tuple[int, list[int]]]:
        """What to tell the runner of a request's blocks: those that the step writes to, or all of them."""
        known = request.request_id in self._known_rows
        first = start // self.kv.block_size if known else 0
        return [(first, ids) for ids in self.kv.block_ids(request, first)]

    # -- results ------------------------------------------------------------------------------

    def update(self, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Retire the oldest step in flight: its KV is computed, its tokens are sampled."""
        flight = self._in_flight.popleft()
        assert flight.plan.step == result.step, f"step {flight.plan.step} is next, got {result.step}"
        sampled = {token.request_id: token for token in result.sampled}
        prompts = {entry.request_id: entry for entry in result.prompt_logprobs}
        outputs = []
        for part in flight.parts:
            request = part.request
            request.num_steps_in_flight -= 1
            request.num_pending -= part.row.samples
            if request.finished:
                continue
            if request.num_preemptions == part.epoch:
                request.num_computed_tokens = part.row.start + part.row.num_tokens
                request.progress_since_preemption += part.row.num_tokens
                self.kv.commit(request)
            error = self._take_prompt_logprobs(request, prompts.get(request.request_id))
            if error is not None:
                self._end(request, FinishReason.ERROR, error=error)
                outputs.append(self._output(request))
            elif part.row.samples:
                outputs.append(self._take_token(request, sampled[request.request_id]))
            elif _is_computed(request):
                self._end(request, FinishReason.LENGTH)
                outputs.append(self._output(request))
        self.kv.retire(flight.plan.step)
        return outputs

    def _take_token(self, request: Request, token: SampledToken) -> EngineOutput:
        assert token.position == request.num_tokens, (
            f"{request.request_id}: a token came for position {token.position}, next is {request.num_tokens}"
        )
        if token.error is not None:
            self._end(request, FinishReason.ERROR, error=token.error)
            return self._output(request, logprobs=token.logprobs)
        request.output_ids.append(token.token_id)
        reason = _reason_to_stop(request, token.token_id)
        if reason is not None:
            self._end(request, reason)
        return self._output(request, [token.token_id], token.logprobs)

    def _take_prompt_logprobs(self, request: Request, entry: PromptLogprobs | None) -> str | None:
        """Keep them; the error there was, if any."""
        if entry is None:
            return None
        assert entry.start == len(request.prompt_logprobs) + 1, (
            f"{request.request_id}: prompt logprobs came from position {entry.start} on, next is "
            f"{len(request.prompt_logprobs) + 1}"
        )
        request.prompt_logprobs += entry.logprobs
        return entry.error

    def _output(
        self, request: Request, new_ids: Sequence[int] = (), logprobs: TokenLogprobs | None = None
    ) -> EngineOutput:
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and not request.prompt_logprobs_sent:
            request.prompt_logprobs_sent = True
            prompt_logprobs = request.prompt_logprobs
        return EngineOutput(
            request_id=request.request_id,
            new_token_ids=list(new_ids),
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _end(self, request: Request, reason: FinishReason, *, error: str | None = None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.kv.free(request)
        else:
            self._waiting.remove(request)
        if reason is FinishReason.ERROR:
            self.kv.unregister(request)
        self.kv.forget(request)
        self._drop_row(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.error = reason, error
        del self._requests[request.request_id]

    def undo(self) -> None:
        """Take back every plan in flight, newest first, as if it had not been made; the next plan
        tells the runner everything anew. Preemptions stay: they cost time, not answers."""
        while self._in_flight:
            for part in self._in_flight.pop().parts:
                self._undo_part(part)
        self.kv.retire(self._step)
        self._known_rows.clear()
        self._dropped, self._reset = [], True

    def _undo_part(self, part: _Scheduled) -> None:
        request = part.request
        self._revert_counters(part)
        if request.finished or request.num_preemptions != part.epoch:
            return
        if part.admitted:
            self.kv.free(request)
            self._running.remove(request)
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
            request.num_computed_tokens = request.num_scheduled_tokens = 0
            self._waiting.add(request)
        else:
            self.kv.shrink(request, part.row.start)

    # -- integrity ----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless counters, queues and blocks agree."""
        self.kv.check_integrity()
        assert len(self._running) <= self.limits.max_num_seqs
        in_flight: dict[Request, int] = {}
        for flight in self._in_flight:
            for part in flight.parts:
                in_flight[part.request] = in_flight.get(part.request, 0) + 1
        waiting = list(self._waiting)
        assert {*waiting, *self._running} == set(self._requests.values())
        for request in self._requests.values():
            name = request.request_id
            assert request.num_steps_in_flight == in_flight.get(request, 0), f"{name}: steps in flight"
            assert 0 <= request.num_computed_tokens <= request.num_scheduled_tokens, f"{name}: counters"
            assert request.num_unscheduled_tokens >= 0, f"{name}: scheduled beyond its end"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING
            assert self.kv.holds(request, request.num_scheduled_tokens), f"{request.request_id}: blocks"
        for request in waiting:
            assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert not self.kv.num_held(request), f"{request.request_id} waits and holds blocks"


def _new_row(request: Request) -> NewRow:
    return NewRow(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids=list(request.output_ids),
        params=request.params,
        stop_ids=tuple(sorted(request.stop_ids)),
    )


def _is_computed(request: Request) -> bool:
    """Whether a request that samples nothing has come to its end."""
    return request.max_tokens == 0 and request.num_computed_tokens == request.num_tokens


def _ends_in_flight(request: Request) -> bool:
    """Whether tokens being sampled already use up max_tokens."""
    return 0 < request.max_tokens <= len(request.output_ids) + request.num_pending


def _samples(request: Request, stop: int) -> bool:
    """Whether a step that ends at `stop` samples a token."""
    return request.max_tokens > 0 and stop == request.num_tokens + request.num_pending


def _prompt_logits(request: Request, start: int, stop: int) -> tuple[int, int]:
    """Positions among [start, stop) whose logits give logprobs of the prompt that are not known yet."""
    first = max(start, len(request.prompt_logprobs))
    return first, max(first, min(stop, request.num_prompt_logits))


def _fit(request: Request, start: int, count: int, max_logits: int) -> int:
    """How many of `count` tokens from `start` on want no more than max_logits rows of logits."""
    while count:
        first, end = _prompt_logits(request, start, start + count)
        excess = end - first + _samples(request, start + count) - max_logits
        if excess <= 0:
            break
        count = max(0, count - excess)  # a token wants at most one row
    return count


def _reason_to_stop(request: Request, token_id: int) -> FinishReason | None:
    if token_id in request.stop_ids:
        return FinishReason.STOP
    if len(request.output_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    return None
