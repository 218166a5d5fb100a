"""Several answers to one request: n > 1.

Each is a request of its own, with a seed of its own, that shares the prompt's KV blocks with its sisters
through the prefix cache and ends on its own. Rule: `child_seed` is a pure function, so that the n answers are
those of n requests with these seeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from octavo.errors import InvalidRequestError
from octavo.messages import EngineRequest
from octavo.outputs import RequestOutput

#: The most answers to one request.
MAX_N = 128
_MASK = 2**64 - 1

Streams = Callable[[EngineRequest], AsyncGenerator[RequestOutput]]


def child_seed(seed: int, index: int) -> int:
    """The seed of answer `index`: `seed` itself for index 0; for others output number `index` of SplitMix64
    (Steele, Lea, Flood, "Fast splittable pseudorandom number generators") begun at `seed`."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def children(request: EngineRequest, n: int) -> list[EngineRequest]:
    """The n requests that a request stands for. InvalidRequestError unless n is in 1..MAX_N."""
    if type(n) is not int or not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n is {n}; it must be an integer in 1..{MAX_N}", param="n")
    seed = request.params.seed
    assert seed is not None, "InputProcessor draws missing seeds"
    return [request, *(_child(request, index, child_seed(seed, index)) for index in range(1, n))]


def _child(request: EngineRequest, index: int, seed: int) -> EngineRequest:
    params = msgspec.structs.replace(request.params, seed=seed)
    return msgspec.structs.replace(request, request_id=f"{request.request_id}-{index}", params=params)


def in_parallel(request: EngineRequest, n: int, stream: Streams) -> AsyncGenerator[RequestOutput]:
    """The outputs of n answers to a request as they come, each with its index. Leaving the iterator leaves
    all of them."""
    each = children(request, n)
    return stream(request) if n == 1 else merged([stream(child) for child in each])


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput]], *, stride: int = 1
) -> AsyncGenerator[RequestOutput]:
    """Outputs of several streams as they come. What is output `index` of stream i, each of which has
    `stride` of them, has the index i * stride + index. The first error ends all."""
    # Bounded, so that what a slow reader leaves waits in the streams, which fold it together.
    inbox: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_pump(i * stride, stream, inbox)) for i, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            output = await inbox.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                open_streams -= 1
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    first: int,
    stream: AsyncGenerator[RequestOutput],
    inbox: asyncio.Queue[RequestOutput | Exception | None],
) -> None:
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                await inbox.put(msgspec.structs.replace(output, index=first + output.index))
        await inbox.put(None)
    except Exception as error:  # handed to whoever reads the merged stream
        await inbox.put(error)
