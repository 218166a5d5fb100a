"""/v1/chat/completions of a real server, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from serving import ENDLESS, Server, serve

MODEL = "tiny-llama-f32"
MAX_NUM_SEQS = 8
CONTEXT = 16384
HI: Any = [{"role": "user", "content": "the cat"}]
#: "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n", where "the" is one token.
HI_TOKENS = 24
#: Sampling, as fields of a request.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "temperature": 1.5, "top_p": 0.9},
    {"seed": 3, "extra_body": {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2}},
    {"seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"65": 5}},
]
LONG: dict[str, Any] = {"temperature": 0, "logit_bias": ENDLESS}


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Server]:
    with (
        serve(tiny_path, "--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(CONTEXT)) as server,
        httpx.Client() as client,
    ):
        assert client.get(f"{server.url}/health").status_code == 200  # this connection stays open
        yield server
        server.wait_until_idle(3)
        assert server.stop(signal.SIGTERM, seconds=3) == 0
        lines = server.messages()
        assert len(lines) == 2, lines  # what was loaded, and where it listens


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 24, **fields})


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


# -- answers ----------------------------------------------------------------------------------------


def test_an_answer(client: OpenAI) -> None:
    answer = ask(client, temperature=0, max_tokens=5, logit_bias=ENDLESS)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert (choice.index, choice.message.role, choice.finish_reason) == (0, "assistant", "length")
    assert choice.message.content
    assert choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (HI_TOKENS, 5)
    assert usage.total_tokens == HI_TOKENS + 5
    assert ask(client, max_tokens=5).usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("fields", WAYS)
def test_the_stream_adds_up_to_the_answer(client: OpenAI, fields: dict[str, Any]) -> None:
    for max_tokens in (1, 2, 3, 40):  # the model is random: answers are full of half characters
        answer = ask(client, max_tokens=max_tokens, **fields)
        chunks = list(ask(client, max_tokens=max_tokens, stream=True, **fields))
        assert text_of(chunks) == answer.choices[0].message.content
        assert text_of(chunks).encode()  # no lone surrogates
        assert chunks[0].choices[0].delta.role == "assistant"
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [answer.choices[0].finish_reason]
        assert len({chunk.id for chunk in chunks}) == 1
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stops(client: OpenAI, stream: bool) -> None:
    def answer(**fields: Any) -> tuple[str, str, int]:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = ask(client, seed=3, stream=stream, **options, **fields)
        if not stream:
            (choice,) = answer.choices
            return choice.message.content, choice.finish_reason, answer.usage.completion_tokens
        *chunks, last = answer
        return text_of(chunks), chunks[-1].choices[0].finish_reason, last.usage.completion_tokens

    whole, _, count = answer(extra_body={"ignore_eos": True})
    assert count == 24
    first, second = whole[4:6], whole[9:11]
    for stop in (first, [second, first, "not there"]):
        text, reason, count = answer(stop=stop)
        assert (text, reason) == (whole[: whole.find(first)], "stop")
        assert 0 < count < 24
    text, _, _ = answer(stop=first, extra_body={"include_stop_str_in_output": True})
    assert text == whole[: whole.find(first)] + first
    token_id = ord("t") - ord("!")  # the tokens of printable bytes come first
    assert answer(extra_body={"stop_token_ids": [token_id]}, logit_bias={str(token_id): 100}) == (
        "",
        "stop",
        1,
    )


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_a_stream_has_no_usage_unless_asked(client: OpenAI, options: Any) -> None:
    extra = {} if options is None else {"stream_options": options}
    chunks = list(ask(client, stream=True, **extra))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_usage_is_one_last_chunk(client: OpenAI) -> None:
    options = {"include_usage": True}
    *chunks, last = ask(client, temperature=0, stream=True, stream_options=options, logit_bias=ENDLESS)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (HI_TOKENS, 24)


def test_events_on_the_wire(server: Server) -> None:
    body = {"messages": HI, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    values = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [value["usage"] is None for value in values] == [True] * (len(values) - 1) + [False]


@pytest.mark.parametrize("top", [None, 0, 3])
def test_logprobs(client: OpenAI, top: int | None) -> None:
    fields: dict[str, Any] = {"logprobs": True, "seed": 7, **({} if top is None else {"top_logprobs": top})}
    answer = ask(client, **fields)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    streamed = [
        entry
        for chunk in ask(client, stream=True, **fields)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content
    for entry in content:
        assert entry.logprob <= 0
        assert entry.token == bytes(entry.bytes).decode(errors="replace")
        assert len(entry.top_logprobs) == (top or 0)
        values = [alternative.logprob for alternative in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    shown = b"".join(bytes(entry.bytes) for entry in content if not entry.token.startswith("<|"))
    assert shown.decode(errors="replace") == answer.choices[0].message.content


def test_the_same_request_twice(client: OpenAI) -> None:
    fields = {"seed": 11, "extra_body": {"repetition_penalty": 1.1}, "logprobs": True}
    first, second = ask(client, **fields), ask(client, **fields)
    assert second.usage.prompt_tokens_details.cached_tokens == 16
    assert first.choices == second.choices


def test_text_parts_are_joined(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]
    in_parts = ask(client, temperature=0, messages=[{"role": "user", "content": parts}])
    whole = ask(client, temperature=0, messages=[{"role": "user", "content": "the\ncat"}])
    assert in_parts.choices == whole.choices
    assert in_parts.usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_last_message_is_gone_on_with(client: OpenAI) -> None:
    messages = [*HI, {"role": "assistant", "content": "the"}]
    answer = ask(client, messages=messages, extra_body={"continue_final_message": True})
    assert answer.usage.prompt_tokens == HI_TOKENS + 1
    closed = ask(client, messages=messages, extra_body={"add_generation_prompt": False})
    assert closed.usage.prompt_tokens == HI_TOKENS + 3  # the turn's end and a newline
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, extra_body=kwargs).usage.prompt_tokens == HI_TOKENS


def test_nulls_and_harmless_fields_change_nothing(server: Server, client: OpenAI) -> None:
    expected = ask(client, temperature=0).choices[0].message.content
    nulls = ["top_p", "n", "stop", "seed", "tools", "logit_bias", "response_format", "stream", "logprobs"]
    body = dict.fromkeys(nulls) | {
        "model": None, "messages": HI, "temperature": 0, "max_tokens": 24, "user": "me", "store": True,
        "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x",
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == expected


# -- refusals ---------------------------------------------------------------------------------------

#: Fields of OpenAI's API that this server does not honour.
NOT_HONOURED: dict[str, Any] = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "functions": [],
    "function_call": "none",
    "response_format": {"type": "text"},
    "prediction": {"type": "content", "content": ""},
    "modalities": ["text"],
    "audio": {"voice": "x", "format": "wav"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "web_search_options": {},
    "max_tokns": 3,
}
#: Fields, and words that the refusal must have.
BAD: list[tuple[dict[str, Any], str, str]] = [
    *(({name: value}, name, f"unknown field '{name}'") for name, value in NOT_HONOURED.items()),
    ({"n": 0}, "n", "n is 0: "),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": 10**9}, "n", "1000000000"),
    ({"n": 1.5}, "n", "valid integer"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"min_tokens": 3}, "min_tokens", "no more than 2"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "valid boolean"),
    ({"cache_salt": 5}, "cache_salt", "valid string"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257 characters; at most 256"),
    ({"cache_salt": "\ud800"}, "cache_salt", "surrogate"),
    ({"priority": 2**70}, "priority", "less than"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0.0, 1.0]"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -1}, "top_k", "-1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 2}, "min_p", "2"),
    ({"seed": -1}, "seed", "-1"),
    ({"seed": 2**64}, "seed", "18446744073709551616"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty is 0"),
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one"),
    ({"logprobs": 1}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs", "20"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    ({"logit_bias": {"AI": -100}}, "logit_bias", "'AI'"),
    ({"logit_bias": {"-1": 5}}, "logit_bias", "'-1'"),
    ({"logit_bias": {"191222": -100}}, "logit_bias", "191222"),
    ({"logit_bias": {"1": 200}}, "logit_bias", "200"),
    ({"logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"stop": ""}, "stop", "0 characters"),
    ({"stop": 5}, "stop", "valid list"),
    ({"stop": ["a", 5]}, "stop.1", "valid string"),
    ({"stop": [str(i) for i in range(17)]}, "stop", "17 strings; at most 16"),
    ({"stop": "\ud800"}, "stop", "surrogate"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output", "needs a stop"),
    ({"stop_token_ids": [191222]}, "stop_token_ids", "191222"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "one of them"),
    ({"continue_final_message": "yes"}, "continue_final_message", "valid boolean"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "'messages'"),
    ({"chat_template_kwargs": {"bos_token": "<s>"}}, "chat_template_kwargs", "'bos_token'"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "'chat_template'"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "dictionary"),
    ({"priority": 1}, "priority", "--policy priority"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages.0", "dictionary"),
    ({"messages": [{}]}, "messages", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "pirate", "content": "hi"}]}, "messages", "'pirate'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD, ids=[str(fields)[:50] for fields, _, _ in BAD])
def test_what_can_not_be_honoured_is_refused_by_name(
    server: Server, fields: dict[str, Any], param: str, says: str
) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 2} | fields)
    response = post(server, body.encode())
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] == "invalid_request"
    assert says in error["message"]


def test_the_client_raises_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, temperature=-1)
    assert (refused.value.param, refused.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="gpt-4")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    assert MODEL in unknown.value.message
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "x" * CONTEXT}], stream=True)
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as far_too_long:
        ask(client, messages=[{"role": "user", "content": "x" * 2_000_000}])
    assert far_too_long.value.code == "context_length_exceeded"


def post(server: Server, body: bytes, content_type: str | None = "application/json") -> httpx.Response:
    headers = {} if content_type is None else {"Content-Type": content_type}
    return httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=headers, timeout=30)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{'messages': []}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [], "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "\\ud800": 1}',
        b'{"messages": [], "' + b"x" * 100_000 + b'": 1}',
        b'{"messages": [], "model": "\\ud800"}',
    ],
    ids=lambda body: body[:40].decode("latin1"),
)
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    response = post(server, body)
    assert response.status_code == (404 if b"model" in body else 400)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert 10 < len(error["message"]) < 500
    assert len(error["param"] or "") < 200


def test_where_the_json_is_wrong(server: Server) -> None:
    message = post(server, b'{"messages": [}').json()["error"]["message"]
    assert message == "the body is no JSON: Expecting value, at character 14"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_other_content_types_are_refused(server: Server, kind: str | None) -> None:
    # A page of another origin can send these without asking the server first.
    response = post(server, json.dumps({"messages": HI, "max_tokens": 1}).encode(), kind)
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


def test_json_with_a_charset_is_fine(server: Server) -> None:
    body = json.dumps({"messages": HI, "max_tokens": 1}).encode()
    assert post(server, body, "application/json; charset=utf-8").status_code == 200


def test_a_huge_body_is_not_read(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100000000000\r\n\r\n{"
        )
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"16 MiB" in answer

    def chunks() -> Iterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    response = httpx.post(
        f"{server.url}/v1/chat/completions", content=chunks(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert server.health()["status"] == "alive"


# -- many at once, and those who leave --------------------------------------------------------------


def test_concurrent_streams_are_as_if_alone(server: Server, client: OpenAI) -> None:
    count = 3 * MAX_NUM_SEQS
    alone = [ask(client, seed=i, max_tokens=30).choices[0].message.content for i in range(count)]

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(i: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=HI, seed=i, max_tokens=30, stream=True
                )
                return text_of([chunk async for chunk in stream])

            return await asyncio.gather(*(one(i) for i in range(count)))

    assert asyncio.run(main()) == alone


def test_clients_who_leave_a_stream(server: Server) -> None:
    body = {"messages": HI, "stream": True, **LONG}
    with httpx.Client() as client:
        for _ in range(5):
            with client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
                text = response.iter_bytes()
                next(text)
                next(text)
                assert server.health()["requests"] == 1
            server.wait_until_idle(2)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_clients_who_leave_at_once_or_while_queued(server: Server, streaming: bool) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, "stream": streaming, **LONG}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connections = []
    for _ in range(3 * MAX_NUM_SEQS):
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(head.encode() + body)
        connections.append(connection)
    for connection in connections[::2]:
        connection.close()
    deadline = time.monotonic() + 30
    while server.health()["requests"] != len(connections[1::2]):
        assert time.monotonic() < deadline, server.health()
    for connection in connections[1::2]:
        connection.close()
    server.wait_until_idle(3)


def test_an_answer_that_is_given_up_does_not_go_on(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HI, **LONG}, timeout=0.3)
    server.wait_until_idle(2)


# -- other routes -----------------------------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "octavo")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("org/other")


def test_health_and_ready(server: Server) -> None:
    assert server.health() == {"status": "alive", "model": MODEL, "requests": 0}
    assert httpx.get(f"{server.url}/ready").json()["status"] == "ready"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/console/../app.py", 404, "not_found"),
        ("GET", "/console/__init__.py", 404, "not_found"),
    ],
)
def test_unknown_routes_answer_in_openais_form(
    server: Server, method: str, path: str, status: int, code: str
) -> None:
    response = httpx.request(method, server.url + path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
