"""Requests that crashed, hung or were misunderstood by other engines, by their number in our list: a 4xx that
says why, and the next request works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from serving import ENDLESS, serve_here
from tiny_models import NUM_TOKENS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "the cat"}]
CONTEXT = 256


@pytest.fixture(scope="module")
def shared(tiny_path: Path) -> Iterator[TestClient]:
    with serve_here(tiny_path, max_model_len=CONTEXT, max_num_seqs=4) as client:
        yield client


@pytest.fixture
def client(shared: TestClient) -> Iterator[TestClient]:
    """An application that answers after each test."""
    yield shared
    response = shared.post(COMPLETIONS, json={"prompt": "the cat", "max_tokens": 2, "seed": 1})
    assert response.status_code == 200
    assert shared.get("/health").json()["status"] == "alive"


def refusal(client: TestClient, route: str, **fields: Any) -> dict[str, Any]:
    """The error that a request gets, streamed or not."""
    prompt: dict[str, Any] = {"messages": HI} if route == CHAT else {"prompt": "the cat"}
    errors = []
    for stream in (False, True):
        body = json.dumps({**prompt, "max_tokens": 5, "stream": stream, **fields})
        response = client.post(route, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        errors.append(response.json()["error"])
    assert errors[0] == errors[1]
    assert errors[0]["type"] == "invalid_request_error"
    error: dict[str, Any] = errors[0]
    return error


def post(client: TestClient, route: str, **fields: Any) -> Any:
    response = client.post(route, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"191222": -100}, "191222"),
        ({"-1": 5}, "'-1'"),
        ({"AI": -100}, "'AI'"),
        ({"5": 200}, "200"),
        ({"5": -100.5}, "-100.5"),
        ({str(NUM_TOKENS): 1}, str(NUM_TOKENS)),
        ({"1.0": 1}, "'1.0'"),
        ({"": 1}, "''"),
        ({"²": 1}, "'²'"),
        ({"9" * 30: 1}, "'999999999"),
    ],
    ids=str,
)
def test_bug_15_a_bias_of_no_token(client: TestClient, route: str, bias: dict[str, float], says: str) -> None:
    error = refusal(client, route, logit_bias=bias)
    assert error["param"] == "logit_bias"
    assert says in error["message"]


@pytest.mark.parametrize(
    "token", [NUM_TOKENS, -1, 2**31, 2**62, 2**64, -(2**63), 10**30, 1.0, "1", None, True, []]
)
@pytest.mark.parametrize("nested", [False, True])
def test_bug_17_ids_that_are_no_tokens(client: TestClient, token: object, nested: bool) -> None:
    for ids in ([0, token], [0, 9, token, 2]):
        error = refusal(client, COMPLETIONS, prompt=[[1], ids] if nested else ids)
        assert error["param"] == "prompt"
        assert f"prompt[{ids.index(token)}]" in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["the", ""], [[1], []]])
def test_bug_18_nothing_to_complete(client: TestClient, prompt: object) -> None:
    for fields in ({}, {"n": 3}, {"echo": True, "max_tokens": 0}):
        error = refusal(client, COMPLETIONS, prompt=prompt, **fields)
        assert error["param"] == "prompt"


@pytest.mark.parametrize("size", [CONTEXT - 1, CONTEXT - 9, CONTEXT, CONTEXT + 1, 100 * CONTEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_bug_19_completions_beyond_the_context(client: TestClient, size: int, n: int) -> None:
    for prompt in ("x" * size, [5] * size):
        error = refusal(client, COMPLETIONS, prompt=prompt, max_tokens=10, n=n)
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize("max_tokens", [10**9, 2**31 - 1, CONTEXT])
def test_bug_19_more_tokens_than_there_is_room(client: TestClient, max_tokens: int) -> None:
    assert refusal(client, COMPLETIONS, max_tokens=max_tokens)["code"] == "context_length_exceeded"
    for name in ("max_tokens", "max_completion_tokens"):
        answer = post(client, CHAT, messages=HI, logit_bias=ENDLESS, **{name: max_tokens})
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"
    assert refusal(client, COMPLETIONS, max_tokens=2**31)["param"] == "max_tokens"
    assert refusal(client, CHAT, max_tokens=10**30)["param"] == "max_tokens"


@pytest.mark.parametrize("size", [1, 100, CONTEXT - 1])
def test_bug_19_null_is_the_remainder(client: TestClient, size: int) -> None:
    body = post(client, COMPLETIONS, prompt="x" * size, max_tokens=None, logit_bias=ENDLESS)
    assert body["usage"]["total_tokens"] == CONTEXT
    default = post(client, COMPLETIONS, prompt="x", logit_bias=ENDLESS)
    assert default["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT * 50])
def test_bug_19_chat_beyond_the_context(client: TestClient, size: int) -> None:
    error = refusal(client, CHAT, messages=[{"role": "user", "content": "x" * size}])
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [*HI, {"role": "system"}],
        [{"content": "x"}],
        [{"role": None, "content": "x"}],
        [[]],
        [None],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
    ],
    ids=str,
)
def test_bug_20_no_conversation(client: TestClient, messages: Any) -> None:
    assert refusal(client, CHAT, messages=messages)["param"].startswith("messages")


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
        {"tool_calls": []},
        {"content": ""},
        {"content": None, "refusal": None, "audio": None},
    ],
    ids=str,
)
def test_bug_20_an_answer_without_content_is_legal(client: TestClient, answer: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", **answer}, *HI]
    assert post(client, CHAT, messages=messages, max_tokens=2)["choices"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["n", "best_of", "top_logprobs", "logprobs", "prompt_logprobs", "top_k"])
@pytest.mark.parametrize("value", [10**6 + 2**40, 10**9 + 2**31, -(10**9), 2**63, 1e300])
def test_bug_S3_sizes_are_capped(client: TestClient, route: str, name: str, value: float) -> None:
    error = refusal(client, route, **{name: value})
    assert error["param"] == name


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{}", b'{"prompt": "\xc3\x28"}', b'{"prompt": "a\xed\xa0\x80"}', b"\x00"]
)
def test_bodies_that_are_no_utf8(client: TestClient, body: bytes) -> None:
    for route in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        response = client.post(route, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")


def test_of_duplicate_keys_the_last_counts(client: TestClient) -> None:
    body = b'{"prompt": 5, "prompt": "x", "max_tokens": 1, "max_tokens": 2, "seed": 1}'
    response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_other_methods_and_routes(client: TestClient, method: str) -> None:
    for route in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        response = client.request(method, route)
        assert response.status_code == 405
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        response = client.request(method, route + "/x")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
