"""Whether a server stays what it is, under everything that clients do, for as long as you like.

Starts `octavo serve` with a key and lets clients send it, at random: answers whole and streamed, streams that
are left, requests that are given up before their answer, prompts that are long or too long, wrong keys, bad
JSON, unknown fields, odd paths, forged hosts. First the whole KV pool is written once, since the system
counts memory when it is first touched. Every request must end in one of four ways, as seen by its
client: ok, refused (as it should be, or because the server is full), aborted (by the client), error (all
else). Afterwards nothing may be under way. Memory of the server's processes is sampled, and its slope after
the first fifth of the time fitted by least squares. The last line of standard output is JSON; the exit code
is 1 where something is not as it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

KEY = "soak-key"
CHAT = "/v1/chat/completions"
DEFAULT_FLAGS = ["--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-gib", "0.25"]
MAX_SLOPE = 1.0  # MB a minute
_SAMPLE_SECONDS = 2.0
_BLOCK_TOKENS = 16
#: What clients do, and how often.
KINDS = {
    "whole": 8, "stream": 12, "leave a stream": 6, "give up": 4, "long prompt": 2, "too long": 1,
    "wrong key": 2, "no key": 1, "bad JSON": 2, "unknown field": 2, "odd path": 1, "forged host": 1,
    "unknown route": 1,
}  # fmt: skip
REFUSALS = {
    "too long": 400, "wrong key": 401, "no key": 401, "bad JSON": 400, "unknown field": 400, "odd path": 401,
    "forged host": 421, "unknown route": 404,
}  # fmt: skip
_FULL = 429


@contextmanager
def server(model: str, flags: list[str]) -> Iterator[tuple[str, int, int]]:
    """A server's address, process id, and the tokens that its KV pool holds."""
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        "--port",
        "0",
        "--model",
        model,
        "--api-key",
        KEY,
        *flags,
    ]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while not (match := re.search(r"Ready at (http://\S+)", Path(log.name).read_text())):
                if process.poll() is not None:
                    sys.exit(f"the server ended:\n{Path(log.name).read_text()}")
                time.sleep(0.1)
            blocks = re.search(r"(\d+) KV\s+blocks", Path(log.name).read_text())
            assert blocks, "it says how many"
            yield match[1], process.pid, int(blocks[1]) * _BLOCK_TOKENS
            process.send_signal(signal.SIGTERM)
            if (code := process.wait(60)) != 0:
                sys.exit(f"the server ended with exit code {code}:\n{Path(log.name).read_text()[-4000:]}")
        finally:
            process.kill()
            process.wait()


def rss_mb(pid: int) -> list[float]:
    """Memory in use by a server's process and those that it started."""
    tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))  # each thread has its own
    pids = [pid, *(int(child) for task in tasks for child in task.read_text().split())]
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in pids]
    return [round(count * os.sysconf("SC_PAGE_SIZE") / 1e6, 1) for count in pages]


class Soak:
    """The clients of one server."""

    def __init__(self, client: httpx.AsyncClient, rng: random.Random, context: int) -> None:
        self.ends: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.surprises: Counter[str] = Counter()
        self.sent = 0
        self.tokens = 0
        self._client = client
        self._rng = rng
        self._context = context

    async def fill(self, num_tokens: int) -> None:
        """Send prompts, each its own, until they have that many tokens together."""
        while num_tokens > 0:
            content = " ".join(self._words(self._context // 6))
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            answer = (await self._client.post(CHAT, json=body)).raise_for_status()
            num_tokens -= answer.json()["usage"]["prompt_tokens"]

    async def request(self) -> None:
        """Send one, and enter how it ended."""
        kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
        self.sent += 1
        self.kinds[kind] += 1
        try:
            end = await self._end(kind)
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            end = f"{type(error).__name__}"
        if end not in ("ok", "refused", "aborted"):
            self.surprises[f"{kind}: {end}"] += 1
            end = "error"
        self.ends[end] += 1

    async def _end(self, kind: str) -> str:
        rng = self._rng
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Tell me of " + " and ".join(self._words(5))}],
            "max_tokens": rng.choice([1, 8, 32, 64]),
            "seed": rng.randrange(100),
        }
        if kind == "long prompt":
            body["messages"][0]["content"] = " ".join(self._words(self._context // 6))
        if kind in ("stream", "leave a stream"):
            return await self._stream(body | {"stream": True}, leave=kind == "leave a stream")
        if kind == "give up":
            try:
                async with asyncio.timeout(rng.random() / 2):
                    await self._client.post(CHAT, json=body)
            except TimeoutError:
                return "aborted"
            return "ok"
        response = await self._client.send(self._single(kind, body))
        if response.status_code == REFUSALS.get(kind, _FULL):
            return "refused" if response.json()["error"]["message"] else "no message"
        if response.status_code in (200, _FULL) and kind not in REFUSALS:
            self.tokens += response.json()["usage"]["completion_tokens"]
            return "ok"
        return f"status {response.status_code}"

    def _single(self, kind: str, body: dict[str, Any]) -> httpx.Request:
        path, headers, content = CHAT, {"Content-Type": "application/json"}, json.dumps(body)
        match kind:
            case "too long":
                body["messages"][0]["content"] = "x " * self._context * 2
                content = json.dumps(body)
            case "wrong key":
                headers["Authorization"] = f"Bearer {KEY}{self._rng.randrange(10)}"
            case "no key":
                headers["Authorization"] = ""
            case "bad JSON":
                content = content[: self._rng.randrange(len(content))]
            case "unknown field":
                content = json.dumps(body | {"beams": 4})
            case "odd path":
                path, headers["Authorization"] = "//health/..//v1/models", ""
            case "forged host":
                headers["Host"] = "evil.example"
            case "unknown route":
                path = f"/v1/{self._rng.randrange(100)}"
        return self._client.build_request("POST", path, content=content, headers=headers)

    async def _stream(self, body: dict[str, Any], *, leave: bool) -> str:
        patience = self._rng.randrange(20) if leave else 10**9
        async with self._client.stream("POST", CHAT, json=body) as response:
            if response.status_code == _FULL:
                return "refused"
            if response.status_code != 200:
                return f"status {response.status_code}"
            last = ""
            async for line in response.aiter_lines():
                if line:
                    last = line
                    self.tokens += 1
                    patience -= 1
                if patience < 0:
                    return "aborted"
            return "ok" if last == "data: [DONE]" else f"ended with {last[:40]}"

    def _words(self, count: int) -> list[str]:
        return [self._rng.choice(("cats", "rain", "trains", "salt", "glass", "kites")) for _ in range(count)]


def slopes_mb_per_minute(samples: list[tuple[float, list[float]]]) -> list[float]:
    """Least squares over (seconds, MB of each process)."""
    minutes = np.array([seconds for seconds, _ in samples]) / 60
    slopes: list[float] = np.polyfit(minutes, np.array([mb for _, mb in samples]), 1)[0].tolist()
    return slopes


async def soak(url: str, pid: int, pool: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the clients, and what came of it."""
    minutes, clients, pause = args.minutes, args.clients, args.pause
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=clients * 2)
    samples: list[tuple[float, list[float]]] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, limits=limits) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        everyone = Soak(client, random.Random(args.seed), model["max_model_len"])
        await everyone.fill(pool + pool // 4)
        started = time.monotonic()
        end = started + minutes * 60

        async def one() -> None:
            while time.monotonic() < end:
                await everyone.request()
                await asyncio.sleep(random.expovariate(1 / pause) if pause else 0)

        async def watch() -> None:
            while time.monotonic() < end:
                samples.append((time.monotonic() - started, rss_mb(pid)))
                await asyncio.sleep(_SAMPLE_SECONDS)

        await asyncio.gather(watch(), *(one() for _ in range(clients)))
        under_way = -1
        for _ in range(100):
            under_way = (await client.get("/health")).json()["requests"]
            if not under_way:
                break
            await asyncio.sleep(0.1)
        ready = (await client.get("/ready")).status_code
    warm = [sample for sample in samples if sample[0] >= minutes * 60 / 5]
    slopes = slopes_mb_per_minute(warm)
    ledger = {name: everyone.ends[name] for name in ("ok", "refused", "aborted", "error")}
    good = (
        everyone.sent == sum(ledger.values())
        and not ledger["error"]
        and under_way == 0
        and ready == 200
        and sum(slopes) < MAX_SLOPE
    )
    return {
        "good": good, "minutes": minutes, "model": model["id"], "clients": clients, "received": everyone.sent,
        **ledger, "surprises": dict(everyone.surprises), "kinds": dict(everyone.kinds),
        "tokens": everyone.tokens, "under_way_afterwards": under_way, "ready": ready,
        "rss_mb_first": warm[0][1], "rss_mb_last": warm[-1][1], "rss_mb_per_minute": round(sum(slopes), 3),
        "rss_mb_per_minute_each": [round(slope, 3) for slope in slopes], "samples": len(warm),
        "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--clients", type=int, default=16, help="how many send requests, one at a time")
    parser.add_argument(
        "--pause", type=float, default=0.1, help="seconds between two of a client, on average"
    )
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    with server(args.model, flags or DEFAULT_FLAGS) as (url, pid, pool):
        result = asyncio.run(soak(url, pid, pool, args))
    for name, value in result.items():
        print(f"{name:>22}  {value}")
    print(json.dumps(result))
    sys.exit(not result["good"])


if __name__ == "__main__":
    main()
