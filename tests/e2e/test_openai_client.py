"""OpenAI's own client, sync and async, with a server process: what a program written for OpenAI does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from serving import ENDLESS, Server, serve

MODEL = "tiny-llama-f32"
HI: Any = [{"role": "user", "content": "the cat"}]
#: Fields of a completion, and of a chat. What OpenAI's client does not know goes in extra_body.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 12},
    {"seed": 3, "n": 3, "max_tokens": 12},
    {"seed": 4, "stop": ["e", "t"], "max_tokens": 40},
    {"seed": 5, "max_tokens": 9, "extra_body": {"min_tokens": 9, "top_k": 40, "cache_salt": "me"}},
    {"seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": ENDLESS, "user": "me"},
]


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Server]:
    with serve(tiny_path, "--max-num-seqs", "8", "--max-model-len", "2048") as server:
        yield server
        server.wait_until_idle(3)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: Any, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, **{"prompt": "the cat", **fields})


def chat(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, **{"messages": HI, **fields})


def texts(answer: Any) -> list[str]:
    return [choice.text if hasattr(choice, "text") else choice.message.content for choice in answer.choices]


def add(joined: dict[int, str], chunk: Any) -> None:
    for choice in chunk.choices:
        text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
        joined[choice.index] = joined.get(choice.index, "") + text


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_sync_async_and_streams_say_the_same(client: OpenAI, ask: Any, fields: dict[str, Any]) -> None:
    answer = ask(client, **fields)
    assert answer.id.startswith("cmpl-" if ask is complete else "chatcmpl-")
    assert len(answer.choices) == fields.get("n", 1)
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    streamed: dict[int, str] = {}
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **fields):
        add(streamed, chunk)
    assert [streamed[index] for index in sorted(streamed)] == texts(answer)
    assert chunk.usage.completion_tokens == answer.usage.completion_tokens

    async def main() -> None:
        url = str(client.base_url)
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as other:
            whole, stream = await asyncio.gather(ask(other, **fields), ask(other, stream=True, **fields))
            assert texts(whole) == texts(answer)
            joined: dict[int, str] = {}
            async for chunk in stream:
                add(joined, chunk)
            assert joined == streamed

    asyncio.run(main())


def test_logprobs_in_both_forms(client: OpenAI) -> None:
    fields: dict[str, Any] = {"seed": 1, "max_tokens": 6, "logit_bias": ENDLESS}
    legacy = complete(client, logprobs=2, echo=True, **fields).choices[0]
    assert legacy.text.startswith("the cat")
    assert len(legacy.logprobs.tokens) == 5 + 6 == len(legacy.logprobs.text_offset)
    assert legacy.logprobs.token_logprobs[0] is None
    entries = chat(client, logprobs=True, top_logprobs=2, **fields).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 6


def test_the_prompt_alone(client: OpenAI) -> None:
    answer = complete(client, echo=True, max_tokens=0, logprobs=0, extra_body={"prompt_logprobs": 1})
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("the cat", 0)
    assert answer.choices[0].prompt_logprobs[0] is None


def test_prompts_of_ids_and_many(client: OpenAI) -> None:
    one = complete(client, prompt=[257, 32, 99], temperature=0)
    many = complete(client, prompt=[[257, 32, 99], [1, 2]], temperature=0, n=2)
    assert [choice.text for choice in many.choices][:2] == [one.choices[0].text] * 2
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.usage.prompt_tokens == 5


def test_errors(client: OpenAI) -> None:
    for ask, fields, param, code in (
        (complete, {"suffix": "x"}, "suffix", "invalid_request"),
        (complete, {"best_of": 3}, "best_of", "invalid_request"),
        (complete, {"prompt": "x" * 4000}, "prompt", "context_length_exceeded"),
        (complete, {"max_tokens": 4000}, "max_tokens", "context_length_exceeded"),
        (chat, {"tools": []}, "tools", "invalid_request"),
        (chat, {"response_format": {"type": "json_object"}}, "response_format", "invalid_request"),
        (chat, {"logit_bias": {"AI": 1}}, "logit_bias", "invalid_request"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **fields)
        assert (refused.value.param, refused.value.code) == (param, code)
        assert refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="gpt-3", prompt="x")
