"""Many clients at once, most of whom don't stay: afterwards the server is as it was."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.platforms.files import allow_open_files
from raw_http import exchange, head, read_answer, read_to_done
from serving import ENDLESS, Server, serve

CONTEXT = 8192
#: Of which the tiny model's KV takes 4 KiB each: a sequence of the whole context, and a quarter of one.
NUM_BLOCKS = CONTEXT // 16 * 5 // 4
MAX_NUM_SEQS = 32
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Server]:
    allow_open_files(4096)
    gib = (NUM_BLOCKS + 0.5) * 4096 / (1 << 30)
    flags = ("--max-model-len", CONTEXT, "--kv-cache-gib", f"{gib:.9f}", "--max-num-seqs", MAX_NUM_SEQS)
    with serve(tiny_path, *map(str, flags), "--max-waiting", "1000") as server:
        assert f"{NUM_BLOCKS} KV blocks" in server.stderr()
        yield server


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def post(content: str, **fields: Any) -> bytes:
    message = {"messages": [{"role": "user", "content": content}], "logit_bias": ENDLESS} | fields
    body = json.dumps(message).encode()
    path = "/v1/chat/completions"
    return head(path, "POST", Content_Type="application/json", Content_Length=str(len(body))) + body


async def passer_by(port: int, rng: random.Random) -> str:
    """A client who may leave at any stage; how it went."""
    stream = rng.random() < 0.8
    fields = {"stream": stream, "max_tokens": rng.choice([1, 30, 2000]), "seed": rng.randrange(9)}
    request = post("the cat " * rng.choice([1, 10, 100]), **fields)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request[: rng.choice([10, len(request) - 1, *[len(request)] * 6])])
        async with asyncio.timeout(rng.choice([0, 0.001, 0.01, 0.1, 0.5, 1, 5])):
            answer = await read_answer(reader)
            assert answer.status == 200, answer
            if stream:
                await read_to_done(reader)
        return "whole"
    except TimeoutError:
        return "left"
    finally:
        with suppress(OSError):
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()


async def pass_by(port: int, count: int, at_once: int, seed: int) -> Counter[str]:
    rng, room = random.Random(seed), asyncio.Semaphore(at_once)

    async def one() -> str:
        async with room:
            return await passer_by(port, rng)

    return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def crowd(server: Server, num_idle: int, num_active: int) -> None:
    """Idle connections, and streams beside them that all come to their end."""
    port = port_of(server)

    async def idle() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("/v1/models"))
        assert (await read_answer(reader)).status == 200
        return reader, writer

    async def active(index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(f"{index}", stream=True, max_tokens=100))
        assert (await read_answer(reader)).status == 200
        await read_to_done(reader)
        writer.close()

    idles = [await idle() for _ in range(num_idle)]
    await asyncio.gather(*(active(i) for i in range(num_active)))
    for reader, writer in idles:
        writer.write(head("/health"))
        health = json.loads((await read_answer(reader)).body)
        assert health["status"] == "alive"
        writer.close()


def numbers(server: Server) -> dict[str, float]:
    """What /metrics says, by name and labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).raise_for_status().text
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def check_idle(server: Server, num_files: int) -> None:
    """No request is under way, every block, place and file is back, and the next request is answered."""
    server.wait_until_idle(5)
    found = numbers(server)
    for gauge in ("open", "running", "waiting"):
        assert found[f"octavo_requests_{gauge}"] == 0
    assert found['octavo_blocks{state="referenced"}'] == 0
    assert found['octavo_blocks{state="free"}'] + found['octavo_blocks{state="cached"}'] == NUM_BLOCKS
    entries = {name: value for name, value in found.items() if name.startswith("octavo_container_entries")}
    assert {name for name, value in entries.items() if value} == set()
    started = time.monotonic()
    (answer,) = [asyncio.run(exchange(port_of(server), post("x" * (CONTEXT - 200), max_tokens=2), 30))]
    assert answer.status == 200
    assert time.monotonic() - started < 20
    deadline = time.monotonic() + 5
    while server.num_files() > num_files:
        assert time.monotonic() < deadline, (server.num_files(), num_files)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("rounds", "num_passing", "num_idle", "num_active"),
    [(1, 150, 200, 64), pytest.param(2, 600, 1000, 256, marks=pytest.mark.slow)],
)
def test_afterwards_everything_is_as_before(
    server: Server, rounds: int, num_passing: int, num_idle: int, num_active: int
) -> None:
    async def load(seed: int) -> Counter[str]:
        async with asyncio.timeout(90):
            went = await pass_by(port_of(server), num_passing, 64, seed)
            await crowd(server, num_idle, num_active)
        return went

    asyncio.run(load(0))  # what is made once is made now
    check_idle(server, server.num_files() + 1)
    num_files, rss = server.num_files(), server.rss()
    for seed in range(1, rounds + 1):
        went = asyncio.run(load(seed))
        assert went["left"] > num_passing // 10
        assert went["whole"] > num_passing // 10
        check_idle(server, num_files)
    assert server.rss() - rss < 16 * MIB
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert "Traceback" not in server.stderr()
