"""An engine in a process of its own: the same answers, and what happens when it dies, hangs, or its parent
goes."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from octavo import LLM, AsyncEngine, SamplingParams
from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.engine import supervisor
from octavo.engine.supervisor import EngineProcess
from octavo.errors import EngineDeadError, InsufficientMemoryError, InvalidRequestError
from octavo.outputs import RequestOutput

SHORT = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
LONG = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
SECONDS = 30.0


def config_for(path: Path, **settings: object) -> EngineConfig:
    return resolve({"model": str(path), "threads": 1, "kv_cache_gib": 0.05, **settings}).config


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[EngineProcess]:
    started = EngineProcess.start(config_for(tiny_path))
    yield started
    started.close()


def run(engine: EngineProcess, scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        client = AsyncEngine(engine)
        try:
            async with asyncio.timeout(SECONDS):
                await scenario(client)
        finally:
            await client.close()

    asyncio.run(main())


async def ask(engine: AsyncEngine, prompt: str, params: SamplingParams = SHORT) -> RequestOutput:
    return [output async for output in engine.generate(prompt, params)][-1]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def begun(engine: AsyncEngine, count: int) -> list[asyncio.Task[RequestOutput]]:
    """So many streams, each of which has given something."""
    first = [asyncio.Event() for _ in range(count)]

    async def follow(event: asyncio.Event) -> RequestOutput:
        async for output in engine.generate("the cat", LONG):  # noqa: B007  the last is the answer
            event.set()
        return output

    tasks = [asyncio.create_task(follow(event)) for event in first]
    await asyncio.gather(*(event.wait() for event in first))
    return tasks


def test_answers_are_those_of_an_engine_in_this_process(engine: EngineProcess, tiny_path: Path) -> None:
    prompts = [f"prompt {i} of many" for i in range(12)]
    with LLM(str(tiny_path), threads=1) as llm:
        expected = llm.generate(prompts, SHORT, progress=False)

    async def scenario(client: AsyncEngine) -> None:
        found = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.text, ours.token_ids, ours.logprobs) == (
                theirs.text,
                theirs.token_ids,
                theirs.logprobs,
            )
        with pytest.raises(InvalidRequestError, match="priority is 3"):
            client.generate("the cat", SHORT, priority=3)

    run(engine, scenario)
    assert engine.trouble == "the engine was closed"


def test_who_leaves_is_aborted(engine: EngineProcess) -> None:
    async def scenario(client: AsyncEngine) -> None:
        for task in await begun(client, 5):
            task.cancel()
        await until(lambda: client.num_streams == 0)
        steps = -1
        child = engine._child
        assert child is not None
        while steps != (steps := child.pulse.num_steps):  # it stops stepping
            await asyncio.sleep(0.3)
        assert (await ask(client, "the cat")).finished

    run(engine, scenario)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_an_engine_that_dies_is_replaced(engine: EngineProcess, number: signal.Signals) -> None:
    async def scenario(client: AsyncEngine) -> None:
        before = await ask(client, "the cat")
        streams, pid = await begun(client, 3), engine.pid
        assert pid is not None
        os.kill(pid, number)
        began = time.monotonic()
        await until(lambda: client.trouble is not None)
        assert time.monotonic() - began < 2
        for error in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert str(error) == (f"the engine process ended: killed by {number.name}; it is being restarted")
        with pytest.raises(EngineDeadError, match="restarted"):
            await ask(client, "the cat")
        await until(lambda: client.trouble is None)
        assert engine.num_restarts == 1
        assert engine.pid != pid
        after = await ask(client, "the cat")
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)

    run(engine, scenario)


def test_an_engine_that_does_not_run_is_said_and_replaced(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "UNRESPONSIVE_SECONDS", 3.0)

    async def scenario(client: AsyncEngine) -> None:
        (stream,) = await begun(client, 1)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        began = time.monotonic()
        await until(lambda: client.trouble is not None)
        assert time.monotonic() - began < 2
        assert "the engine has not run for" in (client.trouble or "")
        with pytest.raises(
            EngineDeadError, match="did not run for 3 s and was killed; it is being restarted"
        ):
            await stream
        await until(lambda: client.trouble is None)
        assert (await ask(client, "the cat")).finished

    run(engine, scenario)


def test_an_engine_that_hangs_in_a_step_is_replaced(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "HUNG_SECONDS", 0.5)

    async def scenario(client: AsyncEngine) -> None:
        child = engine._child
        assert child is not None
        child.pulse.begin_step()  # one that never ends
        await until(lambda: engine.num_restarts == 1)
        await until(lambda: client.trouble is None)
        assert (await ask(client, "the cat")).finished

    run(engine, scenario)


def test_an_engine_that_fails_again_and_again_is_given_up(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MOST_RESTARTS", 1)

    async def scenario(client: AsyncEngine) -> None:
        for restarts in (1, 1):
            await until(lambda: client.trouble is None)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: client.trouble is not None)
            if restarts == engine.num_restarts:
                break
        await until(lambda: "not restarted again" in (client.trouble or ""))
        with pytest.raises(EngineDeadError, match="it failed 2 times in a row"):
            await ask(client, "the cat")

    run(engine, scenario)


def test_what_keeps_it_from_starting_is_raised_here_whole(tiny_path: Path) -> None:
    with pytest.raises(InsufficientMemoryError, match="GiB of KV cache hold") as caught:
        EngineProcess.start(config_for(tiny_path, kv_cache_gib=1e-6))
    (note,) = caught.value.__notes__
    assert "In the engine process:\nTraceback" in note
    assert "make_bill" in note


def test_nothing_is_left_behind_and_nobody_else_may_look(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "_short_folder", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/octavo-test" if len(str(tmp_path)) > 60 else str(tmp_path))
    folder = Path(tempfile.gettempdir())
    folder.mkdir(exist_ok=True)
    engine = EngineProcess.start(config_for(tiny_path))

    async def scenario(client: AsyncEngine) -> None:
        found = list(folder.glob("octavo-*/*"))
        assert {path.name for path in found} == {"engine", "engine-stats", "front", "pulse", "state"}
        for path in found:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path.parent

    run(engine, scenario)
    assert not list(folder.glob("octavo-*"))
    folder.rmdir()


PARENT = """
import sys, time
from octavo.config.resolve import resolve
from octavo.engine.supervisor import EngineProcess
config = resolve({"model": sys.argv[1], "threads": 1, "kv_cache_gib": 0.05}).config
engine = EngineProcess.start(config)
print(engine.pid, "torch" in sys.modules, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_an_engine_does_not_outlive_its_parent(tiny_path: Path, stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid, has_torch = parent.stdout.readline().split()
    assert has_torch == "False", "the front end needs no torch"
    if stopped:
        os.kill(int(pid), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while is_running(int(pid)):
        assert time.monotonic() < deadline, "the engine is an orphan"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
