"""Outputs of one request on their way to whoever reads them.

Rule: bounded, whatever the reader does. Once MAX_PENDING outputs wait, each new one is merged into the last
of them: the reader gets the same text in fewer pieces. Text itself is bounded by the model's context.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from octavo.outputs import RequestOutput

MAX_PENDING = 16


class Inbox:
    """A queue of outputs, for one reader in the loop in which it is written."""

    def __init__(self) -> None:
        self._items: deque[RequestOutput | Exception] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the stream."""
        if len(self._items) >= MAX_PENDING and isinstance(item, RequestOutput):
            last = self._items[-1]
            if isinstance(last, RequestOutput):
                self._items[-1] = _merged(last, item)
                return
        self._items.append(item)
        self._filled.set()

    async def get(self) -> RequestOutput | Exception:
        """The next of them."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return self._items.popleft()


def _merged(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """The newer state, with what both have added."""
    return msgspec.structs.replace(
        newer,
        delta=older.delta + newer.delta,
        new_token_ids=older.new_token_ids + newer.new_token_ids,
    )
