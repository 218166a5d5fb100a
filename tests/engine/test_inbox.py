"""Outputs that nobody takes: the same text, in bounded memory."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.inbox import MAX_PENDING, Inbox
from octavo.errors import EngineDeadError
from octavo.messages import EngineOutput, EngineRequest
from octavo.output.output_processor import OutputProcessor
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams


class Letters:
    """A vocabulary of letters."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(97 + token_id % 26).encode()

    first_token_bytes = token_bytes


def outputs(count: int) -> list[RequestOutput]:
    """What a request of so many tokens yields, one by one."""
    processor = OutputProcessor(Letters())
    params = SamplingParams(max_tokens=count, seed=1)
    processor.add(EngineRequest(request_id="r", prompt_ids=[1], params=params, eos_ids=(), arrival=0.0))
    steps = [
        EngineOutput(
            request_id="r",
            new_token_ids=[i],
            finish_reason=FinishReason.LENGTH if i == count - 1 else None,
        )
        for i in range(count)
    ]
    return processor.process(steps).outputs


@given(st.integers(1, 80), st.lists(st.integers(0, 30), max_size=12))
def test_nothing_is_lost_whoever_is_slow(count: int, takes: list[int]) -> None:
    async def main() -> list[RequestOutput | Exception]:
        inbox, taken = Inbox(), []
        puts = iter(outputs(count))
        for take in takes:
            for _ in range(7):
                if (output := next(puts, None)) is not None:
                    inbox.put(output)
            assert len(inbox) <= MAX_PENDING
            taken += [await inbox.get() for _ in range(min(take, len(inbox)))]
        for output in puts:
            inbox.put(output)
            assert len(inbox) <= MAX_PENDING
        inbox.put(EngineDeadError("the end"))
        while not taken or not isinstance(taken[-1], Exception):
            taken.append(await inbox.get())
        return taken

    *taken, error = asyncio.run(main())
    assert isinstance(error, EngineDeadError)
    whole = outputs(count)[-1]
    assert "".join(output.delta for output in taken) == whole.text
    assert [i for output in taken for i in output.new_token_ids] == whole.token_ids
    last = taken[-1]
    assert (last.text, last.token_ids, last.finish_reason) == (whole.text, whole.token_ids, "length")


def test_who_keeps_up_gets_each_output_as_it_was() -> None:
    async def main() -> None:
        inbox = Inbox()
        for output in outputs(40):
            reader = asyncio.create_task(inbox.get())
            await asyncio.sleep(0)
            inbox.put(output)
            assert await reader is output

    asyncio.run(main())
