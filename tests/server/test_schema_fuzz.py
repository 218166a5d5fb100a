"""Requests that schemathesis draws from our own OpenAPI schema, within it and beyond.

None may be answered with a 5xx or take seconds, and the engine must be as good as new afterwards. What a
request may cost is bounded here, not what it may say: long answers would only be slow.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from starlette.testclient import TestClient

from serving import serve_here
from tiny_models import NUM_TOKENS

CONTEXT = 96
SECONDS = 5.0
ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
#: Of `make test`, and of the slow run, in all.
FEW, MANY = 1_000, 20_000


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with serve_here(tiny_path, max_model_len=CONTEXT, max_num_seqs=4) as client:
        yield client


def bounded(body: Any, *, generates: bool) -> Any:
    """A body that asks for few and short answers, and in half the cases for tokens that the model has: most
    would be refused otherwise, for what no schema can say."""
    if not isinstance(body, dict):
        return body
    body = {"max_tokens": 12, **body} if generates and "max_completion_tokens" not in body else dict(body)
    for name, most in (("n", 4), ("max_tokens", 12), ("min_tokens", 9), ("max_completion_tokens", 12)):
        if isinstance(body.get(name), int) and 0 < body[name] < 2**31:
            body[name] = 1 + body[name] % most
    if len(json.dumps(body, default=repr)) % 2:  # half of them, whichever
        return body
    body.pop("model", None)
    body.pop("priority", None)
    for name in ("stop_token_ids", "tokens", "prompt"):
        body[name] = _known_ids(body[name]) if name in body else None
    if isinstance(body.get("logit_bias"), dict):
        bias = body["logit_bias"].items()
        body["logit_bias"] = {str(int(key) % NUM_TOKENS) if key.isdecimal() else key: v for key, v in bias}
    return {name: value for name, value in body.items() if value is not None}


def _known_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_known_ids(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31:
        return int(value) % NUM_TOKENS
    return value


def fuzz(client: TestClient, route: str, mode: GenerationMode, count: int) -> Counter[int]:
    """Send at least `count` requests; how many got which status."""
    app: Any = client.app
    operation = schemathesis.openapi.from_dict(app.openapi())[route]["POST"]
    statuses: Counter[int] = Counter()

    def send(case: Any) -> None:
        body = case.body
        if not isinstance(body, bytes):
            body = json.dumps(bounded(body, generates=route.startswith("/v1/"))).encode()
        started = time.monotonic()
        response = client.post(route, content=body, headers={"Content-Type": "application/json"})
        assert time.monotonic() - started < SECONDS
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert 0 < len(error["message"]) <= 2000
        elif "text/event-stream" in response.headers["content-type"]:
            assert response.text.endswith("data: [DONE]\n\n")
            assert 'data: {"error"' not in response.text
        statuses[response.status_code] += 1

    strategy = operation.as_strategy(generation_mode=mode)
    rounds = 0
    while (missing := count - statuses.total()) > 0:  # hypothesis stops where it finds little that is new
        draw = settings(max_examples=missing, database=None, suppress_health_check=list(HealthCheck))
        seed(rounds)(draw(given(strategy)(send)))()
        rounds += 1
    return statuses


def check_alive(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "alive", "model": "tiny-llama-f32", "requests": 0}
    asked = {"prompt": "the cat", "seed": 1, "max_tokens": 3}
    assert client.post("/v1/completions", json=asked).status_code == 200


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_any_request_of_the_schema_and_beyond(
    client: TestClient, route: str, mode: GenerationMode, count: int
) -> None:
    statuses = fuzz(client, route, mode, count // (len(ROUTES) * len(MODES)))
    assert sum(statuses.values()) >= count // (len(ROUTES) * len(MODES))
    if mode is GenerationMode.POSITIVE:
        assert statuses[200] > statuses.total() // 10, statuses
    else:
        assert statuses[400] > statuses.total() // 2, statuses
    check_alive(client)
