"""GET /metrics and /version; and that numbers are right after clients left in droves."""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import octavo
from asgi import post
from octavo.backends.native.library import Isa
from octavo.config.resolve import resolve
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.build import build_engine
from octavo.errors import EngineDeadError
from octavo.server.app import create_app
from octavo.server.limits import MAX_BODY_NBYTES
from scraping import Scrape, request_records, scrape
from serving import ENDLESS, serve

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "temperature": 0}
LONG = BODY | {"max_tokens": 8000, "logit_bias": ENDLESS}
GAUGES = ("octavo_requests_open", "octavo_requests_running", "octavo_requests_waiting")

Scenario = Callable[[FastAPI], Awaitable[None]]


def run(path: Path, scenario: Scenario, **settings: object) -> list[dict[str, Any]]:
    """Run a scenario against an app of its own, in this process; the records of its requests."""
    config = resolve({"model": str(path), "threads": 1, **settings}).config

    async def main() -> None:
        app = create_app(build_engine(config))
        async with app.router.lifespan_context(app), asyncio.timeout(60):
            await scenario(app)

    with request_records() as records:
        asyncio.run(main())
    return records


def get(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def idle(app: FastAPI) -> Scrape:
    """Wait until no request is under way; what is told then."""
    while (now := await scrape(app))("octavo_requests_open"):
        await asyncio.sleep(0.01)
    return now


def assert_settled(now: Scrape, blocks: float) -> None:
    """Nothing is under way, and every block is back."""
    assert {name: now(name) for name in GAUGES} == dict.fromkeys(GAUGES, 0)
    assert now.by_label("octavo_blocks")["referenced"] == 0
    assert sum(now.by_label("octavo_blocks").values()) == blocks
    assert not any(now.by_label("octavo_container_entries").values())
    ended = sum(now.by_label("octavo_requests_total").values())
    refused = sum(now.by_label("octavo_requests_refused_total").values())
    assert now("octavo_requests_received_total") == ended + refused


@pytest.mark.parametrize(
    ("clients", "leave_after", "max_num_seqs"),
    [(5, 64, 32), (5, 1, 32), (5, 5000, 32), (100, 64, 32), (40, 64, 2), (40, 1, 1)],
)
def test_bug_39_streams_closed_after_some_bytes(
    tiny_path: Path, clients: int, leave_after: int, max_num_seqs: int
) -> None:
    async def scenario(app: FastAPI) -> None:
        scrapes = [await scrape(app)]
        blocks = sum(scrapes[0].by_label("octavo_blocks").values())
        for _ in range(2):
            await asyncio.gather(
                *(post(app, CHAT, LONG | {"stream": True}, leave_after=leave_after) for _ in range(clients))
            )
            scrapes.append(await idle(app))
            assert_settled(scrapes[-1], blocks)
        assert scrapes[-1].by_label("octavo_requests_total") == {
            "stop": 0,
            "length": 0,
            "abort": 2 * clients,
            "error": 0,
        }
        for before, after in itertools.pairwise(scrapes):
            assert all(value <= after.growing[key] for key, value in before.growing.items())

    records = run(tiny_path, scenario, max_num_seqs=max_num_seqs)
    assert [record["reason"] for record in records] == ["abort"] * 2 * clients
    assert len({record["id"] for record in records}) == 2 * clients


@pytest.mark.parametrize("delay", [0, 0.001, 0.02])
def test_bug_39_clients_of_whole_answers_who_leave(tiny_path: Path, delay: float) -> None:
    """Before, while and after the engine takes the request: each has one end, whichever."""

    async def scenario(app: FastAPI) -> None:
        blocks = sum((await scrape(app)).by_label("octavo_blocks").values())

        async def ask(body: dict[str, Any]) -> int:
            gone = asyncio.Event()
            asyncio.get_running_loop().call_later(delay, gone.set)
            return (await post(app, CHAT, body, leave_at=gone)).status

        bodies = [LONG if i % 2 else BODY for i in range(30)]
        statuses = await asyncio.gather(*(ask(body) for body in bodies))
        now = await idle(app)
        assert_settled(now, blocks)
        ends = now.by_label("octavo_requests_total")
        assert now("octavo_requests_received_total") == 30
        assert ends["length"] + ends["stop"] == statuses.count(200)
        assert ends["abort"] + now(
            "octavo_requests_refused_total", reason="client_gone"
        ) == 30 - statuses.count(200)

    records = run(tiny_path, scenario, max_num_seqs=4)
    assert len(records) == 30


def test_bug_39_when_steps_fail(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(app: FastAPI) -> None:
        blocks = sum((await scrape(app)).by_label("octavo_blocks").values())
        executor = app.state.engine._client._core._executor
        sample, calls = executor.sample, iter(range(10**6))

        def flaky() -> object:
            if next(calls) % 3 == 2:
                raise RuntimeError("out of luck")
            return sample()

        monkeypatch.setattr(executor, "sample", flaky)
        whole = [post(app, CHAT, BODY) for _ in range(10)]
        left = [post(app, CHAT, LONG | {"stream": True}, leave_after=64) for _ in range(10)]
        answers = await asyncio.gather(*whole, *left)
        now = await idle(app)
        assert_settled(now, blocks)
        ends = now.by_label("octavo_requests_total")
        assert sum(ends.values()) == 20
        assert ends["error"] >= sum(answer.status == 500 for answer in answers[:10]) > 0

    records = run(tiny_path, scenario, max_num_seqs=4)
    assert len({record["id"] for record in records}) == len(records) == 20
    assert all((record["reason"] == "error") == (record["error"] is not None) for record in records)


def test_bug_39_over_real_sockets(tiny_path: Path) -> None:
    with serve(tiny_path) as server:
        for _ in range(5):
            with httpx.stream("POST", server.url + CHAT, json=LONG | {"stream": True}) as response:
                next(response.iter_raw(64))
        server.wait_until_idle(10)
        scrape_of = lambda: Scrape(httpx.get(f"{server.url}/metrics").raise_for_status().text)  # noqa: E731
        while (now := scrape_of())("octavo_requests_open"):
            pass
        assert_settled(now, sum(now.by_label("octavo_blocks").values()))
        assert now("octavo_requests_total", reason="abort") == 5
        assert now("octavo_event_loop_lag_seconds_count") > 0
        records = [line for line in server.stderr().splitlines() if line.startswith('{"event":"request_end"')]
        assert len(records) == 5
        assert all('"reason":"abort"' in line for line in records)


def test_what_is_refused_before_the_engine_is_counted_by_why(tiny_path: Path) -> None:
    async def scenario(app: FastAPI) -> None:
        async with get(app) as client:
            await client.post(CHAT, json=BODY | {"tempature": 1})
            await client.post(CHAT, content=b"{")
            await client.post(CHAT, json=BODY | {"model": "gpt-9"})
            await client.post("/v1/no/such/route", json=BODY)
            await client.post(CHAT, content=b"x" * (MAX_BODY_NBYTES + 1))
            await client.get(CHAT)  # asks for nothing that a model does
            await client.get("/v1/models")
            await client.post("/elsewhere", json=BODY)
        now = await scrape(app)
        refused = {k: v for k, v in now.by_label("octavo_requests_refused_total").items() if v}
        assert refused == {"invalid_request": 2, "not_found": 2, "body_too_large": 1}
        assert now("octavo_requests_received_total") == 5
        assert now("octavo_e2e_seconds_count") == 0

    records = run(tiny_path, scenario)
    assert [record["endpoint"] for record in records] == [CHAT] * 3 + ["/v1/no/such/route", CHAT]


def test_a_bug_of_ours_is_an_error(tiny_path: Path) -> None:
    async def scenario(app: FastAPI) -> None:
        def broken(*_: object, **__: object) -> None:
            raise KeyError("oops")

        app.state.engine.chat = broken
        async with get(app) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 500
        assert (await scrape(app))("octavo_requests_total", reason="error") == 1

    (record,) = run(tiny_path, scenario)
    assert (record["reason"], record["error"]) == ("error", "KeyError: 'oops'")


def test_the_route(tiny_path: Path) -> None:
    async def scenario(app: FastAPI) -> None:
        async with get(app) as client:
            plain = await client.get("/metrics")
            assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert Scrape(plain.text)("octavo_engine_up") == 1
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            openmetrics = await client.get("/metrics", headers=accept)
            assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
            assert openmetrics.text.endswith("# EOF\n")

    run(tiny_path, scenario)


def test_an_engine_that_is_gone_costs_its_numbers_only(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(app: FastAPI) -> None:
        def gone(self: AsyncEngine) -> None:
            raise EngineDeadError("it is gone")

        monkeypatch.setattr(AsyncEngine, "stats", gone)
        now = await scrape(app)
        assert now("octavo_engine_up") == 0
        assert now("octavo_requests_open") == 0
        assert "octavo_requests_running" not in now.families

    run(tiny_path, scenario)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in Debian's package prometheus")
def test_promtool_has_nothing_to_say(tiny_path: Path) -> None:
    async def scenario(app: FastAPI) -> None:
        await post(app, CHAT, BODY)
        body, _ = await app.state.metrics.scrape("")
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=body, capture_output=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")

    run(tiny_path, scenario)


def test_version(tiny_path: Path) -> None:
    async def scenario(app: FastAPI) -> None:
        async with get(app) as client:
            body = (await client.get("/version")).json()
        info = app.state.engine.info
        assert (body["version"], body["model"]) == (octavo.__version__, tiny_path.stem)
        assert (body["backend"], body["isa"]) == (info.backend, info.isa)
        assert body["torch"] == importlib.metadata.version("torch")
        assert body["fingerprint"] == info.fingerprint
        assert re.fullmatch(r"fp_[0-9a-f]{10}", info.fingerprint)
        assert re.fullmatch(r"([0-9a-f]{40})?", body["commit"])
        isas = [isa.name.lower() for isa in Isa if isa is not Isa.AUTO] if info.backend == "native" else [""]
        assert info.isa in isas
        build = (await scrape(app)).families["octavo_build_info"].samples[0].labels
        assert build == body

    for backend in ("native", "torch"):
        run(tiny_path, scenario, backend=backend)


def test_the_commit_of_a_checkout() -> None:
    from octavo.server.version import commit

    root = Path(octavo.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("this is no checkout")
    asked = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert commit() == asked.stdout.strip()
