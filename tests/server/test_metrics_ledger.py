"""What /metrics and the log of requests say, against what 500 clients saw."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from asgi import Answer, post
from octavo.config.resolve import resolve
from octavo.engine.build import build_engine
from octavo.messages import EngineRequest
from octavo.server.app import create_app
from scraping import Scrape, request_records, scrape
from serving import ENDLESS

pytestmark = pytest.mark.alone

CHAT = "/v1/chat/completions"
NUM_REQUESTS = 500
NUM_CLIENTS = 16
CONTEXT = 512
#: 40 blocks, hardly more than one request of full length holds: with eight at once, some lose theirs.
KV_CACHE_GIB = 40 * 4096 / 2**30

#: Bodies that are refused, by the reason given.
REFUSED: list[tuple[str, Any]] = [
    ("invalid_request", {"messages": [{"role": "user", "content": "hi"}], "tempature": 1}),
    ("invalid_request", {"messages": []}),
    ("invalid_request", {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"AI": 1}}),
    ("invalid_request", b'{"messages": ['),
    ("not_found", {"messages": [{"role": "user", "content": "hi"}], "model": "gpt-9"}),
    ("context_length_exceeded", {"messages": [{"role": "user", "content": "x" * 600}]}),
]

client: ContextVar[int] = ContextVar("client")


@dataclass
class Ledger:
    """What the clients saw."""

    answers: dict[int, Answer] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)  # whole, stream, abort or a reason to refuse
    ends: Counter[str] = field(default_factory=Counter)
    engine_ids: dict[str, int] = field(default_factory=dict)  # the engine's request id: the client's number


def body_of(rng: random.Random) -> dict[str, Any]:
    """A request that is answered. Some prompts begin alike, so that the cache is hit."""
    text = rng.choice(["the cat sat on the mat and ", "once upon a time ", ""]) * rng.randint(1, 6)
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"{text}{rng.randint(0, 99)}"}],
        "max_tokens": rng.randint(1, 120),
        "temperature": rng.choice([0, 1]),
        "seed": rng.randint(0, 9),
        "logprobs": True,
    }
    if rng.random() < 0.3:
        body["stop"] = ["e", "the"]
    if rng.random() < 0.8:
        body["logit_bias"] = ENDLESS
    return body


async def one(app: FastAPI, number: int, ledger: Ledger) -> None:
    """One client's request, of a kind that is drawn."""
    rng = random.Random(number)
    client.set(number)
    kind = rng.choices(["stream", "whole", "abort", "leave", "refused"], [45, 20, 12, 8, 15])[0]
    body = body_of(rng)
    long = body | {"max_tokens": 300, "logit_bias": ENDLESS, "stop": None}
    if kind == "stream":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = await post(app, CHAT, body)
        ledger.ends[answer.chunks[-2]["choices"][0]["finish_reason"]] += 1
    elif kind == "whole":
        answer = await post(app, CHAT, body)
        ledger.ends[answer.json()["choices"][0]["finish_reason"]] += 1
    elif kind == "abort":
        answer = await post(app, CHAT, long | {"stream": True}, leave_after=rng.choice([1, 64, 2000]))
    elif kind == "leave":
        gone = asyncio.Event()
        asyncio.get_running_loop().call_later(rng.choice([0, 0.002, 0.01]), gone.set)
        answer = await post(app, CHAT, long, leave_at=gone)
        kind = "abort"
    else:
        kind, refused = rng.choice(REFUSED)
        answer = await post(app, CHAT, refused)
        assert 400 <= answer.status < 500
    ledger.answers[number], ledger.kinds[number] = answer, kind


async def run_clients(app: FastAPI, ledger: Ledger) -> list[Scrape]:
    """All requests, NUM_CLIENTS at a time; scrapes taken meanwhile."""
    begin = app.state.engine.requests.begin

    def noting(request: EngineRequest) -> None:
        ledger.engine_ids[request.request_id] = client.get()
        begin(request)

    app.state.engine.requests.begin = noting
    numbers = iter(range(NUM_REQUESTS))
    scrapes = [await scrape(app)]

    async def work() -> None:
        for number in numbers:
            await asyncio.create_task(one(app, number, ledger))

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.2)
            scrapes.append(await scrape(app))

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(work() for _ in range(NUM_CLIENTS)))
    watcher.cancel()
    async with asyncio.timeout(5):
        while (now := await scrape(app))("octavo_requests_open"):
            await asyncio.sleep(0.01)
    return [*scrapes, now]


@dataclass
class Outcome:
    ledger: Ledger
    records: list[dict[str, Any]]
    scrapes: list[Scrape]

    @property
    def last(self) -> Scrape:
        return self.scrapes[-1]

    def pairs(self, *kinds: str) -> Iterable[tuple[dict[str, Any], Answer]]:
        """Records of requests that reached the engine, with what their clients saw."""
        for record in self.records:
            number = self.ledger.engine_ids.get(record["id"], -1)
            if self.ledger.kinds.get(number) in kinds:
                yield record, self.ledger.answers[number]


@pytest.fixture(scope="module")
def outcome(tiny_path: Path) -> Outcome:
    settings = {"threads": 1, "max_model_len": CONTEXT, "kv_cache_gib": KV_CACHE_GIB, "max_num_seqs": 8}
    config = resolve({"model": str(tiny_path), **settings}).config

    async def main() -> Outcome:
        app = create_app(build_engine(config))
        async with app.router.lifespan_context(app):
            ledger = Ledger()
            with request_records() as records:
                scrapes = await run_clients(app, ledger)
            return Outcome(ledger, records, scrapes)

    return asyncio.run(main())


def test_every_request_ended_once(outcome: Outcome) -> None:
    last, kinds = outcome.last, Counter(outcome.ledger.kinds.values())
    refused = {reason: kinds[reason] for reason, _ in REFUSED}
    assert last("octavo_requests_received_total") == NUM_REQUESTS
    assert last.by_label("octavo_requests_total") == {
        "stop": outcome.ledger.ends["stop"],
        "length": outcome.ledger.ends["length"],
        "abort": kinds["abort"],
        "error": 0,
    }
    assert {k: v for k, v in last.by_label("octavo_requests_refused_total").items() if v} == refused
    assert len(outcome.records) == NUM_REQUESTS
    ids = [record["id"] for record in outcome.records if record["id"] is not None]
    assert len(ids) == len(set(ids))
    assert min(kinds["abort"], *refused.values(), *outcome.ledger.ends.values()) > 0


def test_tokens_add_up(outcome: Outcome) -> None:
    last, records = outcome.last, outcome.records
    sums = {
        name: sum(record[name] or 0 for record in records)
        for name in ("cached_tokens", "generated_tokens", "preemptions")
    }
    tokens = last.by_label("octavo_tokens_total")
    assert tokens["generated"] == sums["generated_tokens"]
    assert tokens["prompt_cached"] == sums["cached_tokens"] > 0
    assert last("octavo_preemptions_total") == sums["preemptions"] > 0
    assert tokens["recomputed"] > 0
    for record, answer in outcome.pairs("stream", "whole"):
        usage = answer.json()["usage"] if answer.token_times == [] else answer.chunks[-1]["usage"]
        assert record["prompt_tokens"] == usage["prompt_tokens"]
        assert record["completion_tokens"] == usage["completion_tokens"]
        assert record["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert record["generated_tokens"] >= record["completion_tokens"] > 0


def test_prompts_that_were_not_left_were_computed_or_cached(outcome: Outcome) -> None:
    """Those who left may have left before, or in the middle of, their prompt."""
    tokens = outcome.last.by_label("octavo_tokens_total")
    through = [r["prompt_tokens"] for r in outcome.records if r["generated_tokens"]]
    begun = [r["prompt_tokens"] for r in outcome.records if r["id"] is not None]
    assert sum(through) <= tokens["prompt_computed"] + tokens["prompt_cached"] <= sum(begun)


def near(ours: float, theirs: float) -> bool:
    """Whether two times in milliseconds are within 5 % + 2 ms."""
    return abs(ours - theirs) <= 0.05 * theirs + 2


def test_times_are_those_that_clients_saw(outcome: Outcome) -> None:
    """On average; and one by one, but for the few that had to wait for their turn in the event loop."""
    times: dict[str, list[tuple[float, float]]] = {"e2e": [], "ttft": [], "decode": []}
    for record, answer in outcome.pairs("stream", "whole"):
        times["e2e"].append((record["e2e_ms"], 1e3 * (answer.ended - answer.began)))
    for record, answer in outcome.pairs("stream"):
        times["ttft"].append((record["ttft_ms"], 1e3 * (answer.token_times[0] - answer.began)))
        if record["generated_tokens"] == record["completion_tokens"]:  # or the engine's end is a step later
            times["decode"].append(
                (record["decode_ms"], 1e3 * (answer.token_times[-1] - answer.token_times[0]))
            )
    for name, pairs in times.items():
        assert len(pairs) > 50, name
        assert near(*map(statistics.fmean, zip(*pairs, strict=True))), name
        if name != "decode":  # which the engine's thread and the client's loop end at different times
            assert sum(near(*pair) for pair in pairs) >= 0.95 * len(pairs), name


def test_histograms_hold_what_the_records_say(outcome: Outcome) -> None:
    last, records = outcome.last, outcome.records
    for name, values in {
        "octavo_ttft_seconds": [r["ttft_ms"] for r in records if r["ttft_ms"] is not None],
        "octavo_e2e_seconds": [r["e2e_ms"] for r in records if r["reason"] != "refused"],
        "octavo_queue_seconds": [r["queue_ms"] for r in records if r["queue_ms"] is not None],
    }.items():
        assert last(f"{name}_count") == len(values) > 300
        assert last(f"{name}_sum") == pytest.approx(sum(values) / 1e3, abs=1e-6 * len(values))
    for record in records:
        if record["decode_ms"] is not None:
            stages = record["queue_ms"] + record["prefill_ms"] + record["decode_ms"]
            assert record["ttft_ms"] is None or record["ttft_ms"] >= record["queue_ms"]
            if record["reason"] == "length":  # ended by the engine, and only then by the caller
                assert stages <= record["e2e_ms"] + 0.01
    # Each token that the caller got, but the first of each answer.
    tokens = sum(record["completion_tokens"] for record in records)
    assert last("octavo_itl_seconds_count") == tokens - last("octavo_ttft_seconds_count")


def test_nothing_is_left(outcome: Outcome) -> None:
    last = outcome.last
    for name in ("octavo_requests_open", "octavo_requests_running", "octavo_requests_waiting"):
        assert last(name) == 0, name
    assert last.by_label("octavo_blocks")["referenced"] == 0
    assert not any(last.by_label("octavo_container_entries").values())


def test_what_counts_only_grows_and_blocks_always_add_up(outcome: Outcome) -> None:
    assert len(outcome.scrapes) > 5
    total = sum(outcome.last.by_label("octavo_blocks").values())
    for before, after in itertools.pairwise(outcome.scrapes):
        earlier, later = before.growing, after.growing
        assert earlier.keys() == later.keys()
        assert all(value <= later[key] for key, value in earlier.items())
        assert sum(after.by_label("octavo_blocks").values()) == total
