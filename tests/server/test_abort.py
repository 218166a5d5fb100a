"""Clients who go away, wherever their request stands: it ends within two steps and its blocks return.

The server is real but for its process: the core steps in a thread here, so that steps and blocks can be seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from octavo.config.resolve import resolve
from octavo.config.server import ServerConfig
from octavo.engine.build import build_engine
from octavo.server import connection
from octavo.server.app import create_app
from octavo.server.connection import Connection
from raw_http import exchange, head, listening, read_answer, read_to_done
from serving import ENDLESS

HI = [{"role": "user", "content": "the cat"}]
#: KV of the tiny model's block, for pools of a certain size.
BLOCK_NBYTES = 4096
ENDLESS_ANSWER = {"max_tokens": 4096, "ignore_eos": True, "logit_bias": ENDLESS}


def post(fields: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    body = json.dumps({"messages": HI} | fields).encode()
    return head(path, "POST", Content_Type="application/json", Content_Length=str(len(body))) + body


class Watched:
    """The app, its port, and what its core does."""

    def __init__(self, app: FastAPI, port: int, step_seconds: float) -> None:
        self.app = app
        self.port = port
        self.core = app.state.engine._client._core
        self.num_steps = 0
        self.step_seconds = step_seconds
        step = self.core.step

        def counted() -> object:
            self.num_steps += 1
            time.sleep(self.step_seconds)
            return step()

        self.core.step = counted

    async def connect(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        return reader, writer

    async def until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)

    async def assert_idle_within(self, seconds: float = 20) -> None:
        """Wait for the end of all requests; then everything is back."""
        engine, scheduler = self.app.state.engine, self.core.scheduler
        await self.until(
            lambda: not (scheduler.has_requests or engine.num_streams or engine._client._inbox.qsize()),
            seconds,
        )
        await self.until(lambda: self.app.state.admission.num_taken == 0, 2)
        assert not engine._outputs._streams
        assert scheduler.num_running == scheduler.num_waiting == 0
        kv = scheduler.kv
        kv.check_integrity()
        assert kv.num_available == kv.pool.num_blocks, "blocks are lost"


def run(
    path: Path,
    scenario: Callable[[Watched], Awaitable[None]],
    *,
    step_seconds: float = 0.0,
    **settings: Any,
) -> None:
    """Run a scenario; afterwards everything must be back, and the next request answered."""
    resolved = resolve({"model": str(path), "threads": 1, "kv_cache_gib": 0.25} | settings).config

    async def main() -> None:
        config = ServerConfig(max_waiting=1000)
        app = create_app(build_engine(resolved), config)
        async with app.router.lifespan_context(app), listening(app, config) as port, asyncio.timeout(90):
            watched = Watched(app, port, step_seconds)
            await scenario(watched)
            await watched.assert_idle_within()
            watched.step_seconds = 0.0
            answer = await exchange(port, post({"max_tokens": 3}))
            assert answer.status == 200
            await watched.assert_idle_within()

    asyncio.run(main())


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
@pytest.mark.parametrize("stage", ["at once", "queued", "prefilling", "decoding"])
def test_bug_33_a_request_ends_within_two_steps_of_its_client(
    tiny_path: Path, stage: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_at: list[int] = []
    lost = Connection.connection_lost

    async def scenario(server: Watched) -> None:
        def connection_lost(self: Connection, exc: Exception | None) -> None:
            seen_at.append(server.num_steps)
            lost(self, exc)

        scheduler = server.core.scheduler
        first = None
        if stage == "queued":
            first = await server.connect(post({"stream": True, **ENDLESS_ANSWER}))
            await server.until(lambda: scheduler.num_running == 1)
        content = "x" * 2000 if stage == "prefilling" else "the cat"
        message = {"messages": [{"role": "user", "content": content}], "stream": stream}
        _, writer = await server.connect(post(message | ENDLESS_ANSWER))
        if stage == "queued":
            await server.until(lambda: scheduler.num_waiting == 1)
        elif stage == "prefilling":
            await server.until(lambda: scheduler.num_running == 1)
        elif stage == "decoding":
            await server.until(lambda: server.num_steps > 8)
        monkeypatch.setattr(Connection, "connection_lost", connection_lost)
        writer.transport.abort()
        await server.until(lambda: bool(seen_at))
        if stage == "queued":
            await server.until(lambda: scheduler.num_waiting == 0)
        else:
            await server.until(lambda: not scheduler.has_requests and not server.app.state.engine.num_streams)
        assert server.num_steps - seen_at[0] <= 2
        monkeypatch.undo()
        if first is not None:
            assert scheduler.num_running == 1  # the other goes on
            first[1].transport.abort()

    run(tiny_path, scenario, step_seconds=0.03, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=8192)


@STREAMS
def test_bug_33_a_hundred_who_leave_at_any_moment(tiny_path: Path, stream: bool) -> None:
    rng = random.Random(stream)

    async def scenario(server: Watched) -> None:
        async def one() -> None:
            _, writer = await server.connect(post({"stream": stream, **ENDLESS_ANSWER}))
            await writer.drain()
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.02, 0.2, 0.5]))
            if rng.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()

        await asyncio.gather(*(one() for _ in range(100)))
        await server.assert_idle_within(5)

    run(tiny_path, scenario, max_num_seqs=8, max_model_len=8192)


def test_bug_33_the_head_or_half_of_it_and_gone(tiny_path: Path) -> None:
    request = post({"stream": True, **ENDLESS_ANSWER})

    async def scenario(server: Watched) -> None:
        for length in range(1, len(request), len(request) // 50):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(request[:length])
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert server.app.state.engine.num_streams == 0

    run(tiny_path, scenario)


def test_bug_33_clients_who_only_stop_sending(tiny_path: Path) -> None:
    async def scenario(server: Watched) -> None:
        for stream in (False, True):
            _, writer = await server.connect(post({"stream": stream, **ENDLESS_ANSWER}))
            await server.until(lambda: server.core.scheduler.num_running == 1)
            writer.write_eof()
            await server.assert_idle_within(5)
            writer.close()

    run(tiny_path, scenario, max_model_len=8192)


@STREAMS
def test_bug_33_with_other_requests_behind_it_on_the_connection(tiny_path: Path, stream: bool) -> None:
    async def scenario(server: Watched) -> None:
        request = post({"stream": stream, **ENDLESS_ANSWER})
        _, writer = await server.connect(request * 3)  # the second waits for the first to be answered
        await server.until(lambda: server.core.scheduler.num_running == 1)
        writer.transport.abort()
        await server.assert_idle_within(1)

    run(tiny_path, scenario, step_seconds=0.01, max_model_len=8192)


@pytest.mark.parametrize("seed", range(3))
def test_bug_35_a_pool_of_one_and_a_half_sequences(tiny_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    context = 256
    num_blocks = 3 * context // 2 // 16
    ends: list[str] = []

    async def scenario(server: Watched) -> None:
        assert server.core.scheduler.kv.pool.num_blocks == num_blocks

        async def one(index: int) -> None:
            await asyncio.sleep(rng.random())
            stream = rng.random() < 0.7
            fields = {
                "stream": stream,
                "max_tokens": rng.choice([1, 20, 200]),
                "messages": [{"role": "user", "content": "x" * rng.choice([3, 40, 150]) + str(index % 7)}],
                "logit_bias": ENDLESS,
                "seed": index,
            }
            reader, writer = await server.connect(post(fields))
            try:
                async with asyncio.timeout(rng.choice([None, None, 0.01, 0.1, 0.5])):
                    answer = await read_answer(reader)
                    assert answer.status == 200, answer
                    if stream:
                        await read_to_done(reader)
                ends.append("whole")
            except TimeoutError:
                ends.append("left")
                writer.transport.abort()
            writer.close()

        await asyncio.gather(*(one(i) for i in range(256)))
        await server.assert_idle_within(5)

    gib = num_blocks * BLOCK_NBYTES / (1 << 30)
    run(tiny_path, scenario, max_num_seqs=16, max_model_len=context, kv_cache_gib=gib)
    assert len(ends) == 256
    assert 20 < ends.count("left") < 236


def test_who_does_not_read_costs_no_memory_and_is_dropped(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_SECONDS", 1.5)

    async def scenario(server: Watched) -> None:
        tokenizer = server.app.state.engine.inputs.tokenizer
        monkeypatch.setattr(tokenizer, "token_bytes", lambda _: b"x" * 300)  # events are large
        fields = {"stream": True, "logprobs": True, "top_logprobs": 20, **ENDLESS_ANSWER}
        clients = []
        for _ in range(4):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, post(fields))
            clients.append(client)
        streams = server.app.state.engine._streams
        await server.until(lambda: len(streams) == 4 and all(len(inbox) == 16 for inbox in streams.values()))
        await asyncio.sleep(0.3)
        assert all(len(inbox) == 16 for inbox in streams.values())
        reader, writer = await server.connect(post({"stream": True, "max_tokens": 20}))
        await read_to_done(reader)  # nobody else is held up
        writer.close()
        await server.assert_idle_within(5)
        for client in clients:
            client.close()

    run(tiny_path, scenario, max_model_len=8192)
