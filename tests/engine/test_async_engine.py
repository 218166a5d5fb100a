"""AsyncEngine over a core in this process: many callers at once, callers who leave, and the end of the
engine. `test_supervisor.py` has the core in another process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.scheduler.scheduler import Scheduler

SHORT = SamplingParams(temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=1)
#: Goes on for seconds unless it is stopped.
LONG = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)


def config_for(path: Path, **settings: object) -> EngineConfig:
    return resolve({"model": str(path), "threads": 1, **settings}).config


def run(
    path: Path, scenario: Callable[[AsyncEngine], Awaitable[None]], *, close: bool = True, **settings: object
) -> None:
    """Run a scenario on an engine of its own, within a time limit."""

    async def main() -> None:
        engine = AsyncEngine(await asyncio.to_thread(build_engine, config_for(path, **settings)))
        try:
            async with asyncio.timeout(60):
                await scenario(engine)
        finally:
            if close:
                await engine.close()

    asyncio.run(main())


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def core_of(engine: AsyncEngine) -> EngineCore:
    return engine._client._core


async def wait_until_idle(engine: AsyncEngine, seconds: float = 3) -> None:
    """Wait until the core has nothing to do; then every block is back."""
    scheduler = core_of(engine).scheduler
    async with asyncio.timeout(seconds):
        while scheduler.has_requests or not engine._client._inbox.empty():
            await asyncio.sleep(0.005)
    assert engine.num_streams == 0
    assert not engine._outputs._streams
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks


@asynccontextmanager
async def gate(engine: AsyncEngine) -> AsyncIterator[None]:
    """Hold the core before its next step for as long as the block runs."""
    core, opened = core_of(engine), threading.Event()
    step = core.step

    def gated() -> object:
        opened.wait()
        return step()

    core.step = gated  # type: ignore[method-assign]
    try:
        yield
    finally:
        opened.set()
        core.step = step  # type: ignore[method-assign]


def break_core(engine: AsyncEngine, error: BaseException) -> None:
    """Let the core's next step raise."""

    def broken() -> object:
        raise error

    core_of(engine).step = broken  # type: ignore[method-assign]


def test_many_streams_at_once(tiny_path: Path) -> None:
    prompts = [f"prompt {i} of many" for i in range(40)]

    async def scenario(engine: AsyncEngine) -> None:
        streams = await asyncio.gather(*(collect(engine.generate(p, SHORT)) for p in prompts))
        for prompt, outputs in zip(prompts, streams, strict=True):
            (alone,) = (await collect(engine.generate(prompt, SHORT)))[-1:]
            last = outputs[-1]
            assert last.finish_reason is FinishReason.LENGTH
            assert (last.text, last.token_ids, last.logprobs) == (alone.text, alone.token_ids, alone.logprobs)
            assert "".join(output.delta for output in outputs) == last.text
        await wait_until_idle(engine)

    run(tiny_path, scenario, max_num_seqs=16)


def test_a_chat_is_streamed(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        outputs = await collect(engine.chat([{"role": "user", "content": "hi"}], SHORT))
        assert len(outputs[-1].token_ids) == 16
        assert outputs[-1].prompt_tokens == len(
            engine._inputs.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        )
        message = {"role": "assistant", "content": "the"}
        continued = await collect(engine.chat([message], SHORT, continue_final_message=True))
        whole = await collect(engine.generate("<|im_start|>assistant\nthe", SHORT))
        assert continued[-1].token_ids == whole[-1].token_ids

    run(tiny_path, scenario)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_caller_who_leaves_frees_the_blocks(tiny_path: Path, how: str) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        async def leave_after_three() -> None:
            async with aclosing(engine.generate("the cat", LONG)) as stream:
                seen = 0
                async for _ in stream:
                    seen += 1
                    if seen == 3 and how == "close":
                        return

        tasks = [asyncio.create_task(leave_after_three()) for _ in range(5)]
        stays = asyncio.create_task(collect(engine.generate("the dog", SHORT)))
        if how == "cancel":
            while core_of(engine).scheduler.num_running < 5:
                await asyncio.sleep(0.005)
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await stays)[-1].finish_reason is FinishReason.LENGTH
        await wait_until_idle(engine)

    run(tiny_path, scenario)


def test_a_stop_string_frees_the_blocks(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        whole = (await collect(engine.generate("the cat", SHORT)))[-1]
        stop = whole.text[2:4]
        stopping = msgspec.structs.replace(SHORT, max_tokens=8000, stop=stop)
        streams = (collect(engine.generate("the cat", params)) for params in (stopping, SHORT, stopping))
        first, other, second = await asyncio.gather(*streams)
        for outputs in (first, second):
            last = outputs[-1]
            assert (last.text, last.finish_reason) == (whole.text.split(stop)[0], FinishReason.STOP)
            assert "".join(output.delta for output in outputs) == last.text
            assert last.token_ids == whole.token_ids[: len(last.token_ids)]
        assert other[-1].token_ids == whole.token_ids
        await wait_until_idle(engine)

    run(tiny_path, scenario)


def test_leaving_before_the_first_token_and_while_queued(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        async with gate(engine):
            tasks = [asyncio.create_task(collect(engine.generate("the cat", LONG))) for _ in range(8)]
            await asyncio.sleep(0.05)
            assert engine.num_streams == 8
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until_idle(engine)

    run(tiny_path, scenario, max_num_seqs=2)


def test_a_stream_that_never_began_holds_nothing(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stream = engine.generate("the cat", LONG)
        assert engine.num_streams == 0
        await stream.aclose()
        await wait_until_idle(engine)

    run(tiny_path, scenario)


def test_bad_requests_are_refused_at_once(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError, match="no tokens"):
            engine.generate("", SHORT)
        with pytest.raises(InvalidRequestError, match="at least one message"):
            engine.chat([], SHORT)
        with pytest.raises(InvalidRequestError, match="first come, first served") as error:
            engine.generate("the cat", SHORT, priority=1)
        assert error.value.param == "priority"
        assert engine.num_streams == 0
        assert (await collect(engine.generate("the cat", SHORT)))[-1].finished

    run(tiny_path, scenario)


def test_what_the_core_refuses_ends_that_request_only(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Scheduler.add

    def picky(self: Scheduler, message: object) -> None:
        if message.prompt_ids == [7]:
            raise InvalidRequestError("not this one")
        add(self, message)

    monkeypatch.setattr(Scheduler, "add", picky)

    async def scenario(engine: AsyncEngine) -> None:
        good, bad, other = await asyncio.gather(
            *(collect(engine.generate(prompt, SHORT)) for prompt in ([1], [7], [2]))
        )
        assert [(output.finish_reason, output.error) for output in bad] == [
            (FinishReason.ERROR, "not this one")
        ]
        assert good[-1].finish_reason is other[-1].finish_reason is FinishReason.LENGTH
        await wait_until_idle(engine)

    run(tiny_path, scenario)


def test_priority_goes_first(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        order: list[int] = []

        async def ask(priority: int) -> None:
            async for _ in engine.generate("the cat", SHORT, priority=priority):
                pass
            order.append(priority)

        async with gate(engine):
            tasks = [asyncio.create_task(ask(priority)) for priority in (3, 1, 2, 0)]
            await asyncio.sleep(0.05)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]

    run(tiny_path, scenario, policy="priority", max_num_seqs=1)


def test_when_the_core_dies_every_open_stream_hears_of_it(
    tiny_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate("the cat", LONG))) for _ in range(6)]
        while core_of(engine).scheduler.num_running < 2:
            await asyncio.sleep(0.005)
        assert engine.trouble is None
        break_core(engine, AssertionError("a counter is off"))
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert str(error) == "the engine stopped: AssertionError: a counter is off"
        assert engine.trouble is not None
        assert engine.num_streams == 0
        with pytest.raises(EngineDeadError, match=r"AssertionError: a counter is off\); restart"):
            engine.generate("the cat", SHORT)
        assert engine.num_streams == 0

    with caplog.at_level(logging.CRITICAL):
        run(tiny_path, scenario, max_num_seqs=2)
    (record,) = caplog.records
    assert record.exc_info is not None  # operators get the traceback


def test_close_ends_open_streams(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(collect(engine.generate("the cat", LONG))) for _ in range(3)]
        while core_of(engine).scheduler.num_running < 3:
            await asyncio.sleep(0.005)
        await engine.close()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
        assert engine.trouble is not None
        with pytest.raises(EngineDeadError, match="the engine has stopped; restart"):
            engine.generate("the cat", SHORT)
        await engine.close()

    run(tiny_path, scenario)


@pytest.mark.parametrize("streaming", [False, True], ids=["idle", "streaming"])
def test_a_loop_that_ends_without_close(
    tiny_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[AsyncEngine] = []
    caplog.set_level(logging.WARNING, logger="octavo.requests")  # a server of another test lets it say more

    async def scenario(engine: AsyncEngine) -> None:
        left.append(engine)
        if streaming:
            stream = engine.generate("the cat", LONG)
            await anext(stream)

    run(tiny_path, scenario, close=False)
    left[0]._client.close()
    assert left[0].trouble is not None
    assert not caplog.records
