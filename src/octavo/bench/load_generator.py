"""Sends requests to an OpenAI-compatible server and notes when each piece of an answer comes.

Closed loop: so many requests at once, and the next goes out when one ends. Open loop: requests go out at
given times, whether others have ended or not; the server cannot slow its own load down.

Rule: nothing is computed while it runs that can be computed afterwards; a chunk costs a timestamp.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop

from octavo.bench.datasets import Job
from octavo.bench.events import DONE, EventReader, body_message, error_message, read_chunk
from octavo.bench.http_client import HTTPClient, Target

CHAT, COMPLETIONS = "chat", "completions"
ENDPOINTS = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
_TOO_MANY = 429
_MAX_BODY = 4096  # of an error, which is shown in part
_MAX_WAIT = 60.0  # seconds that a Retry-After is honoured for


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and when.

    concurrency: requests at once (closed loop), unless rate, requests a second, is given (open loop:
    constant or Poisson arrivals; concurrency is then that of the warm-up). num_requests, duration: where to
    stop; whichever comes first. After `duration` seconds no request is sent, and those under way are waited
    for. warmup: requests sent before, and not counted. extra: further fields of each request.
    wait_when_refused: do as a 429's Retry-After says. timeout: seconds for an answer.
    """

    model: str
    endpoint: str = COMPLETIONS
    concurrency: int = 16
    rate: float | None = None
    poisson: bool = True
    num_requests: int | None = None
    duration: float | None = None
    warmup: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    wait_when_refused: bool = False
    timeout: float = 600.0
    seed: int = 0


@dataclass(slots=True)
class Record:
    """One request. Times are those of one clock, in seconds.

    sent: when its bytes went out; the first time, where it was refused and sent again. late: how long after
    it was due. arrivals: when each chunk with text came. error: what kind of failure ended it, with its
    message.
    """

    sent: float = 0.0
    ended: float = 0.0
    late: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int | None = None  # None: the server didn't say
    finish_reason: str | None = None
    refusals: int = 0
    error: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """What a load run left: a record for each request, and the processor time that this program used."""

    records: list[Record]
    started: float
    ended: float
    cpu_seconds: float


def run(
    url: str,
    load: Load,
    jobs: Iterator[Job],
    *,
    api_key: str | None = None,
    on_end: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Put a load on the server at a URL. on_end sees each record once it is complete, warm-up excluded."""
    target = Target.parse(url, api_key)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Generator(target, load, jobs, on_end).run())


class _Generator:
    def __init__(
        self, target: Target, load: Load, jobs: Iterator[Job], on_end: Callable[[Record], None]
    ) -> None:
        self._load = load
        self._jobs = jobs
        self._on_end = on_end
        self._client = HTTPClient(target)
        self._records: list[Record] = []

    async def run(self) -> Run:
        load = self._load
        try:
            await self._closed_loop(self._next_jobs(load.warmup), counted=False)
            started, cpu = time.perf_counter(), time.process_time()
            deadline = started + (load.duration if load.duration is not None else math.inf)
            if load.rate is None:
                await self._closed_loop(self._next_jobs(load.num_requests, deadline), counted=True)
            else:
                await self._open_loop(self._next_jobs(load.num_requests), load.rate, started, deadline)
            ended, cpu = time.perf_counter(), time.process_time() - cpu
        finally:
            self._client.close()
        return Run(self._records, started, ended, cpu)

    def _next_jobs(self, count: int | None, deadline: float = math.inf) -> Iterator[Job]:
        number = 0
        while (count is None or number < count) and time.perf_counter() < deadline:
            yield next(self._jobs)
            number += 1

    async def _closed_loop(self, jobs: Iterator[Job], *, counted: bool) -> None:
        async def work() -> None:
            for job in jobs:  # shared: each takes the next
                if counted:
                    await self._counted_request(job)
                else:
                    await self._request(job, Record())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency):
                group.create_task(work())

    async def _open_loop(self, jobs: Iterator[Job], rate: float, due: float, deadline: float) -> None:
        rng = random.Random(self._load.seed)

        async with asyncio.TaskGroup() as group:
            while due < deadline and (job := next(jobs, None)) is not None:
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._counted_request(job, due))
                due += rng.expovariate(rate) if self._load.poisson else 1 / rate

    async def _counted_request(self, job: Job, due: float | None = None) -> None:
        record = Record()
        self._records.append(record)
        if due is not None:
            record.late = time.perf_counter() - due
        await self._request(job, record)
        self._on_end(record)

    async def _request(self, job: Job, record: Record) -> None:
        path, body = ENDPOINTS[self._load.endpoint], self._body(job)
        record.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._load.timeout):
                while True:
                    answer = _Answer(record)
                    try:
                        await self._client.post(path, body, answer)
                    except OSError as error:
                        answer.cut(error)
                    wait = answer.end()
                    if wait is None or not self._load.wait_when_refused:
                        break
                    await asyncio.sleep(wait)
        except TimeoutError:
            record.error, record.message = "timeout", f"no end after {self._load.timeout:g} s"
        record.ended = time.perf_counter()

    def _body(self, job: Job) -> bytes:
        load = self._load
        body: dict[str, Any] = {"model": load.model, "max_tokens": job.max_tokens, "stream": True}
        if load.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            body["prompt"] = job.prompt
        return msgspec.json.encode(body | {"stream_options": {"include_usage": True}} | dict(load.extra))


class _Answer:
    """Writes into a record what comes back."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = EventReader()
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._body = b""
        self._done = False
        record.error = None
        record.arrivals.clear()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status, self._headers = status, headers

    def body(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._status != 200:
            self._body = (self._body + data)[:_MAX_BODY]
            return
        for event in self._events.feed(data):
            if event == DONE:
                self._done = True
            else:
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            chunk = read_chunk(event)
        except msgspec.DecodeError as error:
            self._fail("unreadable", f"{error}: {event[:200]!r}")
            return
        record = self._record
        if chunk.error is not None:
            self._fail("error in stream", error_message(chunk.error))
        if chunk.usage is not None:
            record.output_tokens = chunk.usage.completion_tokens
            record.prompt_tokens = chunk.usage.prompt_tokens
            record.cached_tokens = chunk.usage.cached_tokens
        for choice in chunk.choices:
            if choice.has_text:
                record.arrivals.append(now)
            record.finish_reason = choice.finish_reason or record.finish_reason

    def cut(self, error: OSError) -> None:
        """The connection failed."""
        self._fail("cut" if self._status else "no connection", str(error) or type(error).__name__)

    def end(self) -> float | None:
        """No more will come. Where the server said to try again later: in how many seconds."""
        if self._record.error is not None:
            return None
        if self._status == _TOO_MANY:
            self._record.refusals += 1
            self._fail("refused", body_message(self._body))
            return self._retry_after()
        if self._status != 200:
            self._fail(f"HTTP {self._status}", body_message(self._body))
        elif not self._done:
            self._fail("cut", "the stream ended without [DONE]")
        return None

    def _retry_after(self) -> float:
        try:
            return min(max(0.0, float(self._headers.get("retry-after", ""))), _MAX_WAIT)
        except ValueError:  # a date, or nothing
            return 1.0

    def _fail(self, kind: str, message: str) -> None:
        if self._record.error is None:
            self._record.error, self._record.message = kind, message
