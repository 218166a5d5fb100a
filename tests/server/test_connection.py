"""Clients who are slow, many, or send what is no request: each is dropped, and the next one is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from octavo.config.server import ServerConfig
from octavo.errors import ConfigError
from octavo.server import connection, limits, serving
from raw_http import app_without_engine, exchange, head, listening, read_answer

Scenario = Callable[[int], Awaitable[None]]
JSON = {"Content_Type": "application/json"}


def run(scenario: Scenario, config: ServerConfig | None = None, app: FastAPI | None = None) -> None:
    """Run a scenario against a server whose app has no engine; it must serve the next client."""

    async def main() -> None:
        async with asyncio.timeout(30), listening(app or make_app(config), config) as port:
            await scenario(port)
            await asyncio.sleep(0.05)
            answer = await exchange(port, head("/nowhere"))
            assert answer.status == 404

    asyncio.run(main())


def make_app(config: ServerConfig | None = None) -> FastAPI:
    """With a route that reads its body, and one that streams without end."""
    app = app_without_engine(config)
    app.state.streamed = 0
    app.state.left = 0

    @app.post("/read")
    async def read(request: Request) -> int:
        return len(await request.body())

    @app.get("/endless")
    async def endless(nbytes: int = 1000) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    app.state.streamed += nbytes
                    yield b"x" * nbytes
                    await asyncio.sleep(0)
            finally:
                app.state.left += 1

        return StreamingResponse(pieces())

    return app


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


# -- heads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /nowhere HTTP/1.1\r\nHost: local", b"\r\n\r\n"])
def test_a_head_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(sent)
        answer = await read_answer(reader)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert await ended(reader) == b""
        writer.close()

    run(scenario)


def test_a_head_that_arrives_a_byte_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        answer = asyncio.create_task(read_answer(reader))
        for each in head("/nowhere", Cookie="x" * 1000):
            if answer.done():
                break
            writer.write(bytes([each]))
            await asyncio.sleep(0.01)
        assert (await answer).status == 408
        writer.close()

    run(scenario)


def test_the_second_head_on_a_connection_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        for _ in range(3):
            writer.write(head("/nowhere"))
            assert (await read_answer(reader)).status == 404
            await asyncio.sleep(0.2)  # idle, which is allowed for longer
        writer.write(b"GET /no")
        assert (await read_answer(reader)).status == 408
        writer.close()

    run(scenario)


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (head("/" + "x" * 9000), 414, "uri_too_long"),
        (head("/?" + "x" * 9000), 414, "uri_too_long"),
        (head("/", Cookie="x" * 40_000), 431, "headers_too_large"),
        (head("/", **{f"X_{i}": "1" for i in range(100)}), 431, "headers_too_large"),
        (b"GET /" + b"x" * 2_000_000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\nCookie: " + b"x" * 2_000_000, 431, "headers_too_large"),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 400_000, 431, "headers_too_large"),
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX Y: 1\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300, 400, "invalid_http"),
        (head("/read", "POST", Content_Length="1", content_length="2"), 400, "invalid_http"),
        (head("/read", "POST", Content_Length="1", Transfer_Encoding="chunked"), 400, "invalid_http"),
        (head("/read", "POST", Content_Length="-1"), 400, "invalid_http"),
        (head("/read", "POST", Content_Length="9" * 18), 413, "body_too_large"),
        (head("/", Upgrade="websocket", Connection="Upgrade"), 200, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_heads_that_are_too_much_or_wrong(request_: bytes, status: int, code: str) -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(request_)
        answer = await read_answer(reader)
        assert answer.status == status
        if code:
            assert answer.error["code"] == code
            assert answer.headers["connection"] == "close"
        writer.close()

    run(scenario)


def test_many_heads_at_once_are_answered_in_turn() -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(head("/nowhere") * 50)
        for _ in range(50):
            assert (await read_answer(reader)).status == 404
        writer.close()

    run(scenario)


# -- bodies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["declared", "chunked"])
def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)

    async def scenario(port: int) -> None:
        size = {"Content_Length": "10"} if how == "declared" else {"Transfer_Encoding": "chunked"}
        answer = await exchange(port, head("/read", "POST", **JSON, **size) + b"1\r\n{\r\n")
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"

    run(scenario)


def test_the_rest_of_a_body_that_was_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)

    async def scenario(port: int) -> None:
        request = head("/nowhere", "POST", Content_Length="200000")
        reader, writer = await connect(port)
        writer.write(request + b"x" * 200_000)  # it comes: the connection goes on
        assert (await read_answer(reader)).status == 404
        writer.write(request)
        assert (await read_answer(reader)).status == 404
        lost = asyncio.create_task(ended(reader))
        while not lost.done():  # it comes a byte at a time: the connection ends
            writer.write(b"x")
            await asyncio.sleep(0.02)
        writer.close()

    run(scenario)


def test_bodies_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_NBYTES", 300_000)

    async def scenario(port: int) -> None:
        held = [await connect(port) for _ in range(2)]
        for _, writer in held:
            writer.write(head("/read", "POST", **JSON, Content_Length="100001") + b"x" * 100_000)
        await asyncio.sleep(0.2)
        request = head("/read", "POST", **JSON, Content_Length="150000") + b"x" * 150_000
        answer = await exchange(port, request)
        assert (answer.status, answer.error["code"]) == (503, "busy")
        assert answer.error["type"] == "server_error"
        for reader, writer in held:
            writer.write(b"x")
            assert (await read_answer(reader)).body == b"100001"
            writer.close()
        assert (await exchange(port, request)).body == b"150000"

    run(scenario)


def test_a_client_who_leaves_in_the_middle_of_its_body() -> None:
    async def scenario(port: int) -> None:
        for _ in range(20):
            _, writer = await connect(port)
            writer.write(head("/read", "POST", **JSON, Content_Length="1000") + b"{")
            await asyncio.sleep(0.001)
            writer.transport.abort()
        assert (await exchange(port, head("/nowhere"))).status == 404  # who comes after is served

    run(scenario)


# -- connections ------------------------------------------------------------------------------------


def test_more_connections_than_allowed() -> None:
    async def scenario(port: int) -> None:
        idle = [await connect(port) for _ in range(5)]
        await asyncio.sleep(0.05)
        for request in (head("/nowhere"), b""):  # one that asks, and one that only waits
            answer = await exchange(port, request)
            assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
            assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
        idle[0][1].write(head("/nowhere"))  # those who were there first are served
        assert (await read_answer(idle[0][0])).status == 404
        for _, writer in idle:
            writer.close()

    run(scenario, ServerConfig(max_connections=5))


def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(head("/nowhere"))
        assert (await read_answer(reader)).status == 404
        assert await ended(reader) == b""
        writer.close()

    run(scenario)


def test_more_connections_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "allow_open_files", lambda wanted: min(wanted, 1000))
    assert serving.max_connections(ServerConfig()) == 872
    assert serving.max_connections(ServerConfig(max_connections=800)) == 800
    with pytest.raises(ConfigError, match="lower it to 872, or raise `ulimit -n`"):
        serving.max_connections(ServerConfig(max_connections=900))


# -- readers ----------------------------------------------------------------------------------------


def test_a_client_who_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.5)
    app = make_app()

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(head("/endless"))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3)
        assert app.state.streamed
        before = app.state.streamed
        await asyncio.sleep(0.1)
        assert app.state.streamed == before, "it goes on although nobody reads"
        await asyncio.sleep(0.4)
        assert app.state.left == 1
        writer.close()

    run(scenario, app=app)


def test_a_slow_reader_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.4)
    app = make_app()

    async def scenario(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(head("/endless"))
        for _ in range(12):
            await asyncio.sleep(0.1)
            await reader.readexactly(1 << 20)
        assert app.state.left == 0
        writer.close()

    run(scenario, app=app)


def test_an_answer_that_nobody_reads_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 0.3)
    app = make_app(ServerConfig(max_connections=1))

    @app.get("/large")
    async def large() -> str:
        return "x" * (32 << 20)

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(head("/large", Connection="close"))
        await reader.readuntil(b"\r\n\r\n")
        assert (await exchange(port, head("/nowhere"))).status == 503
        await asyncio.sleep(0.5)
        assert (await exchange(port, head("/nowhere"))).status == 404
        writer.close()

    run(scenario, ServerConfig(max_connections=1), app)


def test_an_answer_is_not_spoilt_by_what_follows_it() -> None:
    app = make_app()

    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(head("/endless") + b"GET / HTTP/1.1\r\nCookie: " + b"x" * 200_000)
        data = await ended(reader)
        assert data.count(b"HTTP/1.1 ") <= 1
        writer.close()

    run(scenario, app=app)
