"""Orders: who is served first, and who loses its blocks when memory is short.

Rule: an order is a total order. Ties end with the order of arrival, so runs repeat.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from octavo.program.ir import BLOCK_SIZE
from octavo.request import Request

OrderKey = tuple[int, int]


class Policy(enum.StrEnum):
    """fcfs: first come, first served. priority: smaller `priority` first, then first come."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def order_key(policy: Policy) -> Callable[[Request], OrderKey]:
    """The key that sorts requests by who goes first."""
    if policy is Policy.PRIORITY:
        return lambda request: (request.priority, request.sequence)
    return lambda request: (0, request.sequence)


def choose_victim(
    running: Collection[Request],
    key: Callable[[Request], OrderKey],
    loss: Callable[[Request], int],
) -> Request | None:
    """Whom to preempt so that one of `running` gets blocks; it may be the very one that wants them.

    The first in order is never a victim, which is why every request finishes: it always runs, and
    then another is first. Of the others, the worst class loses; in it the request whose loss is
    cheapest, passing over those that have not made a block of progress since they were preempted
    last, and if none is left the youngest.
    """
    first = min(running, key=key)
    others = [request for request in running if request is not first]
    if not others:
        return None
    worst = max(key(request)[0] for request in others)
    candidates = [request for request in others if key(request)[0] == worst]
    exposed = [r for r in candidates if not r.num_preemptions or r.progress_since_preemption >= BLOCK_SIZE]
    if exposed:
        return min(exposed, key=lambda request: (loss(request), -request.sequence))
    return max(candidates, key=key)
