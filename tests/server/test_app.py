"""The application in this process: at the end of the context, and when things go wrong behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from octavo.config.resolve import resolve
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.build import build_engine
from octavo.errors import OctavoError
from octavo.server.app import create_app
from serving import ENDLESS

BODY = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5, "temperature": 0}
CONTEXT = 512
CHAT = "/v1/chat/completions"

Scenario = Callable[[httpx.AsyncClient, FastAPI], Awaitable[None]]


def run(path: Path, scenario: Scenario) -> None:
    """Run a scenario against an app of its own, in this process."""
    config = resolve({"model": str(path), "threads": 1, "max_model_len": CONTEXT}).config

    async def main() -> None:
        app = create_app(build_engine(config))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            await scenario(client, app)

    asyncio.run(main())


def break_core(engine: AsyncEngine, error: BaseException) -> None:
    def broken() -> object:
        raise error

    engine._client._core.step = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 10**9}, {"max_completion_tokens": 10**9}], ids=str)
def test_an_answer_is_as_long_as_the_context_allows(tiny_path: Path, limit: dict[str, int]) -> None:
    async def scenario(client: httpx.AsyncClient, app: FastAPI) -> None:
        messages = [{"role": "user", "content": "x" * (CONTEXT - 60)}]
        answer = await client.post(CHAT, json={"messages": messages, "logit_bias": ENDLESS} | limit)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["total_tokens"] == CONTEXT

    run(tiny_path, scenario)


def test_a_dead_engine(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: httpx.AsyncClient, app: FastAPI) -> None:
        assert (await client.get("/health")).status_code == 200
        break_core(app.state.engine, AssertionError("a counter is off"))
        responses = await asyncio.gather(
            client.post(CHAT, json=BODY), client.post(CHAT, json=BODY | {"stream": True})
        )
        whole, stream = responses
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "engine_dead"
        assert '"code":"engine_dead"' in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        for path in ("/health", "/ready"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["status"].startswith("the engine has stopped")
        for late in (BODY, BODY | {"stream": True}):
            assert (await client.post(CHAT, json=late)).status_code == 503
        assert app.state.engine.num_streams == 0

    with caplog.at_level(logging.CRITICAL):
        run(tiny_path, scenario)


def test_a_request_that_fails(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: httpx.AsyncClient, app: FastAPI) -> None:
        def broken(plan: object) -> None:
            raise RuntimeError("out of luck")

        executor = app.state.engine._client._core._executor
        monkeypatch.setattr(executor, "execute", broken)
        whole = await client.post(CHAT, json=BODY)
        assert whole.status_code == 500
        error = whole.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert error["message"].endswith("RuntimeError: out of luck")
        stream = await client.post(CHAT, json=BODY | {"stream": True})
        assert stream.text.count('"code":"request_failed"') == 1
        monkeypatch.undo()
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await client.get("/health")).json()["requests"] == 0

    run(tiny_path, scenario)


@pytest.mark.parametrize("error", [KeyError("oops"), OctavoError("of no special kind")])
def test_a_bug_is_a_500_in_openais_form(tiny_path: Path, error: Exception) -> None:
    async def scenario(client: httpx.AsyncClient, app: FastAPI) -> None:
        def broken(*_: object, **__: object) -> None:
            raise error

        app.state.engine.chat = broken
        response = await client.post(CHAT, json=BODY)
        assert response.status_code == 500
        body = response.json()["error"]
        assert (body["type"], body["code"]) == ("server_error", "internal_error")
        assert body["message"]

    run(tiny_path, scenario)
