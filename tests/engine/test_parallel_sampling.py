"""n answers to one request: their seeds, what they share, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.engine.parallel_sampling import MAX_N, child_seed, merged
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from tiny_models import NUM_TOKENS

PROMPT = [i % 200 for i in range(100)]
Scenario = Callable[[AsyncEngine], Awaitable[None]]


def run(path: Path, scenario: Scenario) -> None:
    async def main() -> None:
        config = resolve({"model": str(path), "threads": 1, "max_model_len": 512, "max_num_seqs": 8}).config
        engine = AsyncEngine(build_engine(config))
        try:
            await scenario(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def answers(outputs: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    lasts = {output.index: output async for output in outputs}
    return [lasts[index] for index in sorted(lasts)]


def test_seeds_of_children() -> None:
    assert child_seed(7, 0) == 7
    # SplitMix64 begun at 0, as published with its reference implementation
    assert [child_seed(0, i) for i in (1, 2, 3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip
    seeds = [child_seed(seed, i) for seed in (0, 1, 2**63, 2**64 - 1) for i in range(1, MAX_N)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_each_is_the_request_with_its_seed(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(seed=5, max_tokens=20, logprobs=1)
        together = await answers(engine.generate(PROMPT, params, n=20))
        for index, answer in enumerate(together):
            alone_params = SamplingParams(seed=child_seed(5, index), max_tokens=20, logprobs=1)
            (alone,) = await answers(engine.generate(PROMPT, alone_params))
            assert (alone.token_ids, alone.logprobs) == (answer.token_ids, answer.logprobs)
            assert (answer.seed, answer.text) == (child_seed(5, index), alone.text)

    run(tiny_path, scenario)


def test_they_share_the_prompt(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        first, *others = await answers(engine.generate(PROMPT, SamplingParams(max_tokens=3), n=5))
        assert first.cached_tokens == 0
        assert {other.cached_tokens for other in others} == {96}  # 6 blocks of 16

    run(tiny_path, scenario)


def test_without_a_seed_one_is_drawn_for_all(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        some = await answers(engine.generate(PROMPT, SamplingParams(max_tokens=20), n=3))
        seed = some[0].seed
        assert seed is not None
        again = await answers(engine.generate(PROMPT, SamplingParams(max_tokens=20, seed=seed), n=3))
        assert [answer.text for answer in again] == [answer.text for answer in some]

    run(tiny_path, scenario)


def test_leaving_ends_all_of_them(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async with aclosing(engine.generate(PROMPT, params, n=6)) as outputs:
            seen = set[int]()
            while len(seen) < 6:
                seen.add((await anext(outputs)).index)
            assert engine.num_streams == 6
        assert engine.num_streams == 0
        engine.generate(PROMPT, params, n=6)  # never begun
        assert engine.num_streams == 0

    run(tiny_path, scenario)


@pytest.mark.parametrize("n", [0, -1, MAX_N + 1, 10**9, 1.0, True])
def test_n_is_capped(tiny_path: Path, n: int) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        with pytest.raises(
            InvalidRequestError, match=rf"n is {n}; it must be an integer in 1\.\.128"
        ) as error:
            engine.generate(PROMPT, SamplingParams(max_tokens=1), n=n)
        assert error.value.param == "n"

    run(tiny_path, scenario)


def test_each_ends_on_its_own(tiny_path: Path) -> None:
    async def scenario(engine: AsyncEngine) -> None:
        stops = tuple(range(0, NUM_TOKENS, 20))[:14]
        params = SamplingParams(seed=1, max_tokens=30, stop_token_ids=stops, temperature=1.5)
        ended = await answers(engine.generate(PROMPT, params, n=12))
        assert {answer.finish_reason for answer in ended} == {FinishReason.STOP, FinishReason.LENGTH}
        assert len({answer.num_tokens for answer in ended}) > 3

    run(tiny_path, scenario)


def test_an_error_of_one_ends_the_merged_stream() -> None:
    closed = []

    async def stream(index: int) -> AsyncGenerator[RequestOutput]:
        try:
            await asyncio.sleep(0 if index == 1 else 60)
            raise InvalidRequestError("no more")
            yield  # type: ignore[unreachable]
        finally:
            closed.append(index)

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match="no more"):
            await answers(merged([stream(i) for i in range(3)]))

    asyncio.run(main())
    assert sorted(closed) == [0, 1, 2]
