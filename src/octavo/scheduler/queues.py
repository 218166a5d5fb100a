"""The queue of requests that wait for blocks and a row.

Rule: always sorted by the policy's key, so a preempted request returns to its old place.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from octavo.request import Request
from octavo.scheduler.policy import OrderKey


class WaitingQueue:
    """Requests in the order in which they are admitted."""

    def __init__(self, key: Callable[[Request], OrderKey]) -> None:
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The requests, first to be admitted first; the queue may change meanwhile."""
        return iter(tuple(self._requests))

    def add(self, request: Request) -> None:
        """Insert at the request's place."""
        bisect.insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        self._requests.remove(request)
