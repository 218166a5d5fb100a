"""Who is served first, and who loses its blocks."""

from __future__ import annotations

import pytest

from octavo.program.ir import BLOCK_SIZE
from octavo.request import Request
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policy import Policy, choose_victim, order_key
from octavo.scheduler.queues import WaitingQueue


def make(sequence: int, *, priority: int = 0, preempted: int = 0, progress: int = 0) -> Request:
    """A request, the `sequence`-th that came."""
    return Request(
        request_id=f"r{sequence}",
        prompt_ids=[1],
        params=SamplingParams(),
        max_tokens=1,
        stop_ids=frozenset(),
        priority=priority,
        arrival=0.0,
        sequence=sequence,
        num_preemptions=preempted,
        progress_since_preemption=progress,
    )


def victim(requests: list[Request], losses: list[int], policy: Policy = Policy.FCFS) -> str | None:
    """The victim's id, given what each would lose."""
    loss = dict(zip([r.request_id for r in requests], losses, strict=True))
    chosen = choose_victim(requests, order_key(policy), lambda request: loss[request.request_id])
    return None if chosen is None else chosen.request_id


def test_the_cheapest_loss_is_preempted() -> None:
    assert victim([make(0), make(1), make(2), make(3)], [0, 30, 10, 20]) == "r2"


def test_of_equal_losses_the_youngest_is_preempted() -> None:
    assert victim([make(2), make(0), make(3), make(1)], [5, 5, 5, 5]) == "r3"


def test_the_first_in_order_never_loses() -> None:
    assert victim([make(4), make(3)], [100, 0]) == "r4"
    assert victim([make(3)], [0]) is None


@pytest.mark.parametrize("progress", [0, BLOCK_SIZE - 1])
def test_a_preempted_request_is_shielded_until_it_made_a_block_of_progress(progress: int) -> None:
    shielded = make(1, preempted=1, progress=progress)
    assert victim([make(0), shielded, make(2)], [0, 1, 50]) == "r2"


def test_a_block_of_progress_ends_the_shield() -> None:
    exposed = make(1, preempted=1, progress=BLOCK_SIZE)
    assert victim([make(0), exposed, make(2)], [0, 1, 50]) == "r1"


def test_if_all_are_shielded_the_youngest_loses() -> None:
    shielded = [make(i, preempted=1) for i in (1, 3, 2)]
    assert victim([make(0), *shielded], [0, 1, 50, 2]) == "r3"
    assert victim([make(0, preempted=1), make(1, preempted=1)], [0, 9]) == "r1"


def test_the_lowest_class_loses_first() -> None:
    requests = [make(0, priority=2), make(1, priority=0), make(2, priority=2), make(3, priority=1)]
    losses = [90, 1, 80, 0]
    assert victim(requests, losses, Policy.PRIORITY) == "r2"
    assert victim(requests, losses, Policy.FCFS) == "r3"


def test_a_shield_does_not_reach_into_another_class() -> None:
    requests = [make(0, priority=0), make(1, priority=0), make(2, priority=9, preempted=1)]
    assert victim(requests, [0, 0, 99], Policy.PRIORITY) == "r2"


def test_the_first_in_order_is_first_by_class_then_by_arrival() -> None:
    requests = [make(0, priority=5), make(9, priority=1)]
    assert victim(requests, [0, 0], Policy.PRIORITY) == "r0"
    assert victim(requests, [0, 0], Policy.FCFS) == "r9"


@pytest.mark.parametrize(("policy", "order"), [(Policy.FCFS, "0123"), (Policy.PRIORITY, "2013")])
def test_the_waiting_queue_is_sorted(policy: Policy, order: str) -> None:
    queue = WaitingQueue(order_key(policy))
    requests = [make(0, priority=1), make(1, priority=1), make(2, priority=0), make(3, priority=7)]
    for i in (3, 1, 0, 2):
        queue.add(requests[i])
    assert [request.sequence for request in queue] == [int(c) for c in order]
    queue.remove(requests[1])
    queue.add(requests[1])
    assert [request.sequence for request in queue] == [int(c) for c in order]
    assert len(queue) == 4


def test_the_waiting_queue_may_change_while_it_is_walked() -> None:
    queue = WaitingQueue(order_key(Policy.FCFS))
    for i in range(3):
        queue.add(make(i))
    for request in queue:
        queue.remove(request)
    assert len(queue) == 0
