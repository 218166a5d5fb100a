"""How many requests are let in at once.

Rule: a request takes its places before anything is done for it, and holds them until its answer is sent or
its client has left. Who finds none is told when to come again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from fastapi import Request
from starlette.types import Scope

from octavo.errors import InvalidRequestError, QueueFullError

_MIN_RETRY, _MAX_RETRY = 1, 60
#: Told while too little has ended to compute a rate from.
_UNKNOWN_RETRY = 5
#: The rate is that of so many ends, as far as they are recent.
_ENDS, _RECENT_SECONDS = 64, 60.0
_TICKET = "octavo.ticket"


class Admission:
    """The places of one server. `draining`: it is about to stop, and takes no more work."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.num_taken = 0
        self.draining = False
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_ENDS)

    def take(self, count: int) -> None:
        """Take places. QueueFullError if they are taken, InvalidRequestError if there aren't that many."""
        if count > self.capacity:
            raise InvalidRequestError(
                f"this asks for {count} answers at once, but the server takes at most {self.capacity}; ask "
                "for fewer",
                param="n",
            )
        if self.num_taken + count > self.capacity:
            seconds = self.retry_after(count)
            raise QueueFullError(
                f"{self.num_taken} of {self.capacity} requests are under way, and this one needs {count}; "
                f"try again in {seconds} s",
                retry_after=seconds,
            )
        self.num_taken += count

    def give_back(self, count: int) -> None:
        """Places are free again."""
        self.num_taken -= count
        self._ends.extend([self._clock()] * count)

    def retry_after(self, count: int) -> int:
        """Seconds until `count` places are free, at the rate at which requests have ended lately."""
        now = self._clock()
        recent = [end for end in self._ends if end > now - _RECENT_SECONDS]
        if len(recent) < 2:
            return _MAX_RETRY if len(self._ends) > 1 else _UNKNOWN_RETRY
        needed = self.num_taken + count - self.capacity
        seconds = needed * (now - recent[0]) / (len(recent) - 1)
        return min(max(math.ceil(seconds), _MIN_RETRY), _MAX_RETRY)


class Ticket:
    """The places that one HTTP request holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._count = 0

    def take(self, count: int) -> None:
        """See `Admission.take`."""
        self._admission.take(count)
        self._count += count

    def give_back(self) -> None:
        """The request has ended."""
        if self._count:
            self._admission.give_back(self._count)
            self._count = 0

    def put_into(self, scope: Scope) -> None:
        """Make it known to the route that will serve the request."""
        scope[_TICKET] = self


def admit(request: Request, count: int = 1) -> None:
    """Take places for `count` answers, which are given back when the request ends, however it does.

    Routes call this before they tokenise. QueueFullError, HTTP 429, where the server is full.
    """
    ticket: Ticket = request.scope[_TICKET]
    ticket.take(count)
