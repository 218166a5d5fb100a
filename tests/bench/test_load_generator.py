"""The load generator against a scripted server: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import load_generator
from octavo.bench.datasets import Job, Lengths, synthetic
from octavo.bench.load_generator import Load, Record, Run
from octavo.bench.reports import itls, summarize, ttft
from octavo.errors import ConfigError
from openai_server import Reply, Script, ScriptedServer, scripted_server
from serving import serve

#: How long a chunk may take from the server's clock to the client's, on cores that others share.
SLACK = 0.25


def jobs() -> Iterator[Job]:
    return (Job(f"prompt {number}", 5) for number in itertools.count())


def put_load(script: Script, **load: Any) -> tuple[Run, ScriptedServer]:
    with scripted_server(script) as server:
        defaults = {"model": "m", "num_requests": 4, "concurrency": 2}
        return load_generator.run(server.url, Load(**(defaults | load)), jobs()), server


def put_one(script: Script, **load: Any) -> Record:
    (record,) = put_load(script, num_requests=1, **load)[0].records
    return record


async def three(body: Any, reply: Reply) -> None:
    await reply.stream("a", "b", "c")


# -- what is sent -------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_requests(endpoint: str) -> None:
    run, server = put_load(three, endpoint=endpoint, extra={"temperature": 0.5})
    assert {request.path for request in server.requests} == {load_generator.ENDPOINTS[endpoint]}
    prompts = []
    for request in server.requests:
        body = dict(request.body)
        prompts.append(body.pop("messages")[0]["content"] if endpoint == "chat" else body.pop("prompt"))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        assert body == {"model": "m", "max_tokens": 5, "temperature": 0.5, **options}
        assert "authorization" not in request.headers
    assert sorted(prompts) == [f"prompt {number}" for number in range(4)]
    for record in run.records:
        assert record.error is None
        assert (len(record.arrivals), record.prompt_tokens, record.output_tokens) == (3, 7, 3)


def test_a_key_and_a_path() -> None:
    with scripted_server(three) as server:
        load = Load(model="m", num_requests=1)
        load_generator.run(f"{server.url}/behind/a/proxy/", load, jobs(), api_key="secret")
    (request,) = server.requests
    assert request.path == "/behind/a/proxy/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://[::1", "http://x:port"])
def test_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        load_generator.run(url, Load(model="m"), jobs())


# -- when it is sent ----------------------------------------------------------------------------------


async def slow(body: Any, reply: Reply) -> None:
    await reply.stream("a", delays=[0.05])


def test_a_closed_loop_keeps_so_many_open() -> None:
    run, server = put_load(slow, num_requests=12, concurrency=3)
    assert server.most_at_once == 3
    assert len(run.records) == 12
    assert run.ended - run.started >= 4 * 0.05
    assert len({request.connection for request in server.requests}) == 3  # and connections are kept


def test_a_warm_up_is_not_counted() -> None:
    ended: list[Record] = []
    with scripted_server(slow) as server:
        load = Load(model="m", num_requests=2, concurrency=2, warmup=3)
        run = load_generator.run(server.url, load, jobs(), on_end=ended.append)
    assert len(server.requests) == 5
    assert len({request.body["prompt"] for request in server.requests}) == 5
    assert sorted(ended, key=id) == sorted(run.records, key=id)
    assert len(ended) == 2
    assert all(record.sent >= run.started for record in ended)


@pytest.mark.parametrize("load", [{"concurrency": 2}, {"rate": 30.0}], ids=["closed", "open"])
def test_a_duration(load: dict[str, Any]) -> None:
    run, _ = put_load(slow, num_requests=None, duration=0.4, **load)
    assert len(run.records) > 3
    assert all(record.error is None for record in run.records)
    assert max(record.sent for record in run.records) <= run.started + 0.4 + SLACK
    assert run.ended - run.started < 0.4 + 0.05 + 2 * SLACK


def test_constant_arrivals() -> None:
    run, server = put_load(slow, rate=50.0, poisson=False, num_requests=20)
    due = [run.started + number / 50 for number in range(20)]
    for record, moment in zip(run.records, due, strict=True):
        assert moment - 0.002 < record.sent < moment + SLACK  # timers count milliseconds
        assert record.late == pytest.approx(record.sent - moment, abs=0.02)
    assert server.most_at_once > 1  # it does not wait for answers


def test_poisson_arrivals() -> None:
    run, _ = put_load(three, rate=400.0, num_requests=400, seed=5)
    planned = [record.sent - record.late for record in run.records]
    gaps = [b - a for a, b in itertools.pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(1 / 400, rel=0.15)
    # An exponential distribution's deviation is its mean; constant gaps would have none.
    assert statistics.stdev(gaps) == pytest.approx(1 / 400, rel=0.3)


# -- what is measured ---------------------------------------------------------------------------------

DELAYS = [0.15, 0.03, 0.06, 0.03, 0.2]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_known_delays(endpoint: str) -> None:
    async def script(body: Any, reply: Reply) -> None:
        await reply.stream(*"abcde", delays=DELAYS)

    run, server = put_load(script, endpoint=endpoint, num_requests=3, concurrency=1)
    for record, reply in zip(run.records, server.replies, strict=True):
        for arrived, sent in zip(record.arrivals, reply.sent, strict=True):
            assert sent <= arrived < sent + SLACK
        assert DELAYS[0] <= (ttft(record) or 0) < DELAYS[0] + SLACK
        assert itls(record)[-1] == pytest.approx(DELAYS[-1], abs=0.1)
        assert sum(DELAYS) <= record.ended - record.sent < sum(DELAYS) + 2 * SLACK
    itl = summarize(run).itl_ms
    assert itl is not None
    assert itl.p50 == pytest.approx(45, abs=20)
    assert itl.max == pytest.approx(200, abs=100)


def test_a_role_and_an_end_are_no_text() -> None:
    async def script(body: Any, reply: Reply) -> None:
        await reply.head()
        await reply.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.1)
        await reply.text("a")
        await reply.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await reply.done()

    record = put_one(script, endpoint="chat")
    assert (len(record.arrivals), record.finish_reason, record.output_tokens) == (1, "stop", None)
    assert (ttft(record) or 0) >= 0.1


# -- what goes wrong ----------------------------------------------------------------------------------


async def refuse(body: Any, reply: Reply) -> None:
    await reply.json({"error": {"message": "the queue is full"}}, 429, Retry_After="0.05")


async def fail(body: Any, reply: Reply) -> None:
    await reply.json({"error": {"message": "out of luck"}}, 500)


async def error_in_stream(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("a")
    await reply.event({"error": {"message": "NaN logits"}})
    await reply.done()


async def cut_in_stream(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("a")
    reply.cut()


async def end_in_stream(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("a")
    await reply.raw(b"0\r\n\r\n")


async def cut_at_once(body: Any, reply: Reply) -> None:
    reply.cut()


async def rubbish_in_stream(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.body(b"data: {oops\n\n")
    await reply.done()


async def no_http(body: Any, reply: Reply) -> None:
    await reply.raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


async def no_end(body: Any, reply: Reply) -> None:
    await reply.head()
    await reply.text("a")
    await asyncio.sleep(20)


FAILURES: list[tuple[Script, str, str]] = [
    (refuse, "refused", "the queue is full"),
    (fail, "HTTP 500", "out of luck"),
    (error_in_stream, "error in stream", "NaN logits"),
    (cut_in_stream, "cut", "the connection ended before the answer did"),
    (end_in_stream, "cut", "without [DONE]"),
    (rubbish_in_stream, "unreadable", "{oops"),
    (no_http, "no connection", "the answer is no HTTP"),
    (no_end, "timeout", "no end after 0.4 s"),
]


@pytest.mark.parametrize(("script", "kind", "says"), FAILURES, ids=[f[0].__name__ for f in FAILURES])
def test_a_failure_is_one_requests(script: Script, kind: str, says: str) -> None:
    answered = itertools.count()

    async def every_other(body: Any, reply: Reply) -> None:
        await (script if next(answered) % 2 else three)(body, reply)

    run, _ = put_load(every_other, num_requests=6, concurrency=1, timeout=0.4)
    failed = [record for record in run.records if record.error is not None]
    assert len(failed) == 3
    for record in failed:
        assert (record.error, says in record.message) == (kind, True), record.message
        assert record.ended >= record.sent
    summary = summarize(run)
    assert (summary.completed, summary.output_tokens) == (3, 9)
    assert {name: count.count for name, count in summary.errors.items()} == {kind: 3}


def test_a_server_that_hangs_up_at_once() -> None:
    """It may have closed the connection while it was idle, so one more is tried, and only one."""
    run, server = put_load(cut_at_once, num_requests=3, concurrency=1)
    assert [record.error for record in run.records] == ["no connection"] * 3
    assert len(server.requests) == 3  # none of these connections was idle

    first = itertools.count()

    async def once(body: Any, reply: Reply) -> None:
        await (cut_at_once if next(first) else three)(body, reply)

    run, server = put_load(once, num_requests=2, concurrency=1)
    assert [record.error for record in run.records] == [None, "no connection"]
    assert len(server.requests) == 3


def test_nobody_listens() -> None:
    with scripted_server(three) as server:
        url = server.url
    run = load_generator.run(url, Load(model="m", num_requests=2), jobs())
    assert [record.error for record in run.records] == ["no connection"] * 2


@pytest.mark.parametrize("retry_after", ["0.1", "soon", None])
def test_a_refused_request_is_sent_again_if_asked(retry_after: str | None) -> None:
    times: list[float] = []

    async def script(body: Any, reply: Reply) -> None:
        times.append(time.perf_counter())
        headers = {} if retry_after is None else {"Retry_After": retry_after}
        if len(times) < 3:
            await reply.json({"error": "full"}, 429, **headers)
        else:
            await reply.stream("a")

    record = put_one(script, wait_when_refused=True)
    assert (record.error, record.refusals, record.output_tokens) == (None, 2, 1)
    wait = 0.1 if retry_after == "0.1" else 1.0
    for before, after in itertools.pairwise(times):
        assert wait - 0.01 < after - before < wait + SLACK
    assert (ttft(record) or 0) > 2 * wait - 0.02  # what its user waited


def test_a_connection_that_was_closed_while_idle() -> None:
    """The server hangs up after each answer, without a word of it: no request is lost."""

    async def script(body: Any, reply: Reply) -> None:
        await three(body, reply)
        reply.cut()

    run, server = put_load(script, num_requests=20, concurrency=1)
    assert [record.error for record in run.records] == [None] * 20
    assert len({request.connection for request in server.requests}) == 20


@pytest.mark.parametrize("close", ["header", "HTTP/1.0"])
def test_a_body_that_ends_with_the_connection(close: str) -> None:
    async def script(body: Any, reply: Reply) -> None:
        version, header = ("1.1", "Connection: close\r\n") if close == "header" else ("1.0", "")
        await reply.raw(f"HTTP/{version} 200 OK\r\n{header}\r\n".encode())
        await reply.raw(b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')
        reply._writer.close()

    run, _ = put_load(script, num_requests=3)
    assert [(record.error, len(record.arrivals)) for record in run.records] == [(None, 1)] * 3


def test_any_cut_of_the_bytes_gives_the_same_record() -> None:
    answer = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'22\r\ndata: {"choices":[{"text":"a"}]}\n\n\r\n'
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    )
    sizes = itertools.cycle([1, 2, 3, 5, 8, len(answer)])

    async def script(body: Any, reply: Reply) -> None:
        size = next(sizes)
        for start in range(0, len(answer), size):
            await reply.raw(answer[start : start + size])
            await asyncio.sleep(0)

    run, _ = put_load(script, num_requests=6, concurrency=1)
    assert [(record.error, len(record.arrivals)) for record in run.records] == [(None, 1)] * 6


# -- a real server ------------------------------------------------------------------------------------


def test_a_real_server(tiny_path: Path) -> None:
    data: Callable[..., Iterator[Job]] = synthetic
    lengths = {"prompt_words": Lengths(4, 8), "max_tokens": Lengths(5, 20)}
    with serve(tiny_path) as server:
        load = Load(
            model=tiny_path.stem,
            endpoint="chat",
            num_requests=12,
            concurrency=4,
            warmup=2,
            extra={"ignore_eos": True, "temperature": 0},
        )
        run = load_generator.run(server.url, load, data(**lengths, seed=9))
        server.wait_until_idle(5)
    assert [record.error for record in run.records] == [None] * 12, run.records
    sent = list(itertools.islice(data(**lengths, seed=9), 2, 14))
    assert sorted(record.output_tokens or 0 for record in run.records) == sorted(
        job.max_tokens for job in sent
    )
    assert all(record.prompt_tokens > 0 and record.arrivals for record in run.records)
