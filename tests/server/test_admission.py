"""The bounded queue: who is let in, who is told to come again, and when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.errors import InvalidRequestError, QueueFullError
from octavo.server.admission import Admission, Ticket
from serving import ENDLESS, Server, serve

HI = [{"role": "user", "content": "the cat"}]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def full(capacity: int = 4) -> tuple[Admission, Clock]:
    clock = Clock()
    admission = Admission(capacity, clock)
    admission.take(capacity)
    return admission, clock


def test_places_are_counted_by_answers() -> None:
    admission = Admission(4)
    one, three, none = (Ticket(admission) for _ in range(3))
    one.take(1)
    three.take(3)
    with pytest.raises(QueueFullError, match="4 of 4 requests are under way, and this one needs 1"):
        none.take(1)
    none.give_back()
    assert admission.num_taken == 4
    three.give_back()
    three.give_back()
    assert admission.num_taken == 1
    none.take(2)
    with pytest.raises(QueueFullError, match="this one needs 2"):
        admission.take(2)


def test_more_than_there_ever_are_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequestError, match=r"asks for 5 answers at once, .* at most 4") as error:
        Admission(4).take(5)
    assert error.value.param == "n"


def test_when_to_come_again_follows_the_rate_of_ends() -> None:
    admission, clock = full(12)
    assert admission.retry_after(1) == 5  # nothing to compute from
    for _ in range(11):  # one end in 2 seconds
        admission.give_back(1)
        admission.take(1)
        clock.now += 2
    assert admission.retry_after(1) == 3  # 22 s for 10 intervals: nothing ended in the last 2 s
    assert admission.retry_after(4) == 9
    clock.now += 20  # it has slowed down
    assert admission.retry_after(4) == 17
    clock.now += 100  # it stands still
    assert admission.retry_after(1) == 60


def test_it_comes_in_whole_seconds_of_1_to_60() -> None:
    admission, clock = full()
    admission.give_back(4)
    admission.take(4)
    clock.now += 0.001
    assert admission.retry_after(1) == 1
    clock.now += 55
    assert admission.retry_after(4) == 60


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.floats(0, 90)), max_size=60))
def test_places_and_tickets_agree(steps: list[tuple[int, bool, float]]) -> None:
    clock = Clock()
    admission = Admission(6, clock)
    held: list[tuple[Ticket, int]] = []
    for count, leave, seconds in steps:
        clock.now += seconds
        if leave and held:
            held.pop(0)[0].give_back()
        else:
            ticket = Ticket(admission)
            if admission.num_taken + count > 6:
                with pytest.raises(QueueFullError) as error:
                    ticket.take(count)
                assert 1 <= error.value.retry_after <= 60
            else:
                ticket.take(count)
                held.append((ticket, count))
        assert admission.num_taken == sum(count for _, count in held) <= 6


def test_the_default_is_four_times_what_runs() -> None:
    assert ServerConfig().capacity(EngineConfig(max_num_seqs=8)) == 40
    assert ServerConfig(max_waiting=3).capacity(EngineConfig(max_num_seqs=8)) == 11


def test_front_ends_share_the_places() -> None:
    assert ServerConfig(max_waiting=3).capacity(EngineConfig(max_num_seqs=8, api_workers=2)) == 6


# -- a real server ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Server]:
    with serve(tiny_path, "--max-num-seqs", "2", "--max-waiting", "3") as server:
        yield server


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_a_full_queue(server: Server, streaming: bool) -> None:
    body: dict[str, Any] = {"messages": HI, "logit_bias": ENDLESS, "max_tokens": 400, "stream": streaming}

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(ask, range(16)))
    refused = [response for response in responses if response.status_code == 429]
    assert len(responses) - len(refused) >= 5
    assert all(response.status_code == 200 for response in responses if response not in refused)
    assert refused
    for response in refused:
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert f"try again in {response.headers['retry-after']} s" in error["message"]
    server.wait_until_idle(5)
    assert ask(0).status_code == 200


def test_a_refused_request_is_not_looked_at(server: Server) -> None:
    body: dict[str, Any] = {"messages": HI, "logit_bias": ENDLESS, "stream": True}
    with httpx.Client(timeout=30) as client:
        url = f"{server.url}/v1/chat/completions"
        streams = [client.stream("POST", url, json=body) for _ in range(5)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        too_long = {"messages": [{"role": "user", "content": "x" * 2_000_000}]}
        assert client.post(url, json=too_long).status_code == 429  # not 400: it was not tokenised
        assert client.get(f"{server.url}/v1/models").status_code == 200
        for stream in streams:
            stream.__exit__(None, None, None)
    server.wait_until_idle(5)
    answer = httpx.post(url, content=json.dumps(too_long), headers={"Content-Type": "application/json"})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
