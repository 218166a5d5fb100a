"""One record for each request, whatever became of it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.engine.request_log import Origin, origin
from octavo.engine.request_record import RequestRecord, log_to, write
from octavo.errors import EngineDeadError, InvalidRequestError
from scraping import request_records

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)


def run(
    path: Path, scenario: Callable[[AsyncEngine], Awaitable[None]], **settings: object
) -> list[dict[str, Any]]:
    """Run a scenario on an engine of its own; the records of its requests."""
    config = resolve({"model": str(path), "threads": 1, **settings}).config

    async def main() -> None:
        engine = AsyncEngine(build_engine(config))
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
                while engine.trouble is None and len(engine.requests):
                    await asyncio.sleep(0.005)
        finally:
            await engine.close()
        stats = engine.requests.stats()
        ended = sum(stats.ends.values()) + sum(stats.refusals.values())
        assert (stats.received, stats.open) == (ended, 0)
        assert stats.received == len(records)

    with request_records() as records:
        asyncio.run(main())
    return records


async def collect(engine: AsyncEngine, params: SamplingParams, prompt: str = "the cat") -> None:
    async for _ in engine.generate(prompt, params):
        pass


async def leave(engine: AsyncEngine, after: int) -> None:
    async with aclosing(engine.generate("the cat", LONG)) as stream:
        for _ in range(after):
            await anext(stream)


def test_an_answer(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await collect(engine, SHORT)

    (record,) = run(tiny_path, scenario)
    assert (record["event"], record["reason"]) == ("request_end", "length")
    assert record["id"].startswith("request-")
    assert (record["endpoint"], record["model"]) == ("", tiny_path.stem)
    assert (record["prompt_tokens"], record["cached_tokens"]) == (5, 0)
    assert record["completion_tokens"] == record["generated_tokens"] == 8
    assert (record["preemptions"], record["error"], record["refusal"]) == (0, None, None)
    stages = [record[f"{stage}_ms"] for stage in ("queue", "prefill", "decode")]
    assert all(value > 0 for value in stages)
    assert sum(stages) <= record["e2e_ms"]
    assert record["queue_ms"] + record["prefill_ms"] <= record["ttft_ms"] <= record["e2e_ms"]


def test_a_stop_string_is_a_stop_though_the_engine_was_told_to_abort(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        whole = [output async for output in engine.generate("the cat", LONG_ENOUGH)][-1]
        await collect(engine, msgspec.structs.replace(LONG, stop=whole.text[4:6]))

    LONG_ENOUGH = msgspec.structs.replace(SHORT, max_tokens=40)
    _, record = run(tiny_path, scenario)
    assert record["reason"] == "stop"
    assert record["generated_tokens"] >= record["completion_tokens"] > 0
    assert record["decode_ms"] >= 0


@pytest.mark.parametrize("after", [0, 1, 3])
def test_callers_who_leave(tiny_path: Path, after: int) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        await asyncio.gather(*(leave(engine, after) for _ in range(5)), collect(engine, SHORT))

    records = run(tiny_path, scenario, max_num_seqs=3)
    aborted = [record for record in records if record["reason"] == "abort"]
    # A stream that was closed before it began asked nothing of the engine; no HTTP request was behind it.
    assert len(aborted) == (5 if after else 0)
    assert len(records) == len(aborted) + 1
    for record in aborted:
        assert record["completion_tokens"] == after
        assert record["generated_tokens"] >= after
        assert record["queue_ms"] is not None
        assert record["error"] is None


def test_callers_who_leave_the_queue(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, LONG)) for _ in range(6)]
        while engine.stats().running < 1 or engine.stats().waiting < 5:
            await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    records = run(tiny_path, scenario, max_num_seqs=1)
    assert [record["reason"] for record in records] == ["abort"] * 6
    assert sum(record["prefill_ms"] is None for record in records) == 5  # these never ran


def test_a_refusal_says_why(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        for prompt, priority in (("", 0), ("the cat", 1), ([7] * 600, 0)):
            with pytest.raises(InvalidRequestError):
                engine.generate(prompt, SHORT, priority=priority)
        with pytest.raises(InvalidRequestError):
            engine.chat([], SHORT)

    records = run(tiny_path, scenario, max_model_len=512)
    assert {record["reason"] for record in records} == {"refused"}
    reasons = ["invalid_request", "invalid_request", "context_length_exceeded", "invalid_request"]
    assert [record["refusal"] for record in records] == reasons
    assert "no tokens" in records[0]["error"]


def test_the_engine_dies(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, LONG)) for _ in range(4)]
        while engine.stats().running < 4:
            await asyncio.sleep(0.005)

        def broken() -> object:
            raise AssertionError("a counter is off")

        engine._client._core.step = broken  # type: ignore[method-assign]
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await collect(engine, SHORT)

    with caplog.at_level(logging.CRITICAL):
        records = run(tiny_path, scenario)
    assert [record["reason"] for record in records] == ["error"] * 4 + ["refused"]
    assert records[4]["refusal"] == "engine_dead"
    for record in records[:4]:
        assert record["error"] == "the engine stopped: AssertionError: a counter is off"
        assert record["queue_ms"] is None  # nobody is left who knows
        assert record["e2e_ms"] > 0


def test_those_who_left_are_recorded_though_the_engine_dies_before_it_hears(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.generate("the cat", LONG)
        await anext(stream)
        core = engine._client._core

        def broken(request_id: str) -> object:
            raise AssertionError(f"{request_id} is not there")

        core.abort = broken  # type: ignore[method-assign]
        await stream.aclose()
        while engine.trouble is None or len(engine.requests):
            await asyncio.sleep(0.005)

    with caplog.at_level(logging.CRITICAL):
        (record,) = run(tiny_path, scenario)
    assert (record["reason"], record["queue_ms"]) == ("abort", None)


def test_a_closed_engine_ends_its_requests(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, LONG)) for _ in range(3)]
        while engine.stats().running < 3:
            await asyncio.sleep(0.005)
        await engine.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    records = run(tiny_path, scenario)
    assert [(r["reason"], r["error"]) for r in records] == [("error", "the engine was closed")] * 3


def test_where_a_request_came_from(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        source = Origin("/v1/chat/completions", arrival=loop.time() - 1)
        token = origin.set(source)
        await collect(engine, SHORT)
        with pytest.raises(InvalidRequestError):
            engine.generate("", SHORT)
        unstarted = engine.generate("the cat", SHORT)
        assert source.handled
        engine.requests.settle(source, 200)
        await unstarted.aclose()
        engine.requests.settle(source, 200)
        origin.reset(token)

    records = run(tiny_path, scenario)
    assert {record["endpoint"] for record in records} == {"/v1/chat/completions"}
    assert [record["reason"] for record in records] == ["length", "refused", "abort"]
    assert all(record["e2e_ms"] >= 1000 for record in records)
    assert records[0]["queue_ms"] >= 1000


def test_a_record_is_one_line_of_json() -> None:
    logger = logging.getLogger("octavo.requests")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    stream = io.StringIO()
    try:
        log_to(stream)
        log_to(stream)  # twice is no reason to say it twice
        error = "bad\nnews \ud800" + "x" * 10_000
        write(RequestRecord(endpoint="/v1/" + "y" * 1000, model="m", reason="error", error=error))
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    (line,) = stream.getvalue().splitlines()
    assert len(line) < 1500
    assert json.loads(line)["error"].startswith("bad\nnews ")
