"""/v1/completions, /tokenize and /detokenize of an application in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from serving import ENDLESS, serve_here
from tiny_models import EOS_ID, NUM_TOKENS, make_llama_directory, write_tokenizer

CONTEXT = 1024
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with serve_here(tiny_path, max_model_len=CONTEXT) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post(COMPLETIONS, json={"prompt": "the cat", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def chunks_of(client: TestClient, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    response = client.post(path, json={"prompt": "the cat", "stream": True, **fields})
    *events, done, rest = response.text.split("\n\n")
    assert (response.status_code, done, rest) == (200, "data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def refused(client: TestClient, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": "the cat", **fields})  # which can say lone surrogates
    response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that chunks add up to, in the form of an answer that was not streamed."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {**piece, "text": "", "logprobs": None})
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                known = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                choice["logprobs"] = {name: known[name] + piece["logprobs"][name] for name in known}
    return [choices[index] for index in sorted(choices)]


def test_a_completion(client: TestClient) -> None:
    body = ask(client, temperature=0, logit_bias=ENDLESS)
    (choice,) = body["choices"]
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert "prompt_logprobs" not in choice
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 16, 21)


def test_a_prompt_in_every_form(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": "the cat"}).json()["tokens"]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "echo": True}
    alone = ask(client, **fields)["choices"][0]["text"]
    assert alone.startswith("the cat")
    assert ask(client, prompt=ids, **fields)["choices"][0]["text"] == alone
    other = ask(client, prompt="x", **fields)["choices"][0]["text"]
    for prompts in (["the cat", "x"], [ids, [ord("x")]]):
        body = ask(client, prompt=prompts, **fields)
        assert [choice["text"] for choice in body["choices"]] == [alone, other]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert body["usage"]["prompt_tokens"] == 6
        assert [choice["text"] for choice in joined(chunks_of(client, prompt=prompts, **fields))] == [
            alone, other,
        ]  # fmt: skip


@pytest.mark.parametrize("max_tokens", [None, 0, 1, 9])
def test_how_long_a_completion_may_be(client: TestClient, max_tokens: int | None) -> None:
    prompt = "x" * (CONTEXT - 30)
    body = ask(client, prompt=prompt, max_tokens=max_tokens, logit_bias=ENDLESS, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == (30 if max_tokens is None else max_tokens)
    assert body["choices"][0]["finish_reason"] == "length"
    assert (body["choices"][0]["text"] == "") == (max_tokens == 0)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("count", [0, 3, 20])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_logprobs(client: TestClient, echo: bool, count: int, max_tokens: int) -> None:
    fields: dict[str, Any] = {
        "prompt": "the 🥹 cat", "echo": echo, "logprobs": count, "max_tokens": max_tokens, "seed": 5, "n": 2,
        "logit_bias": ENDLESS,
    }  # fmt: skip
    body = ask(client, **fields)
    for choice in body["choices"]:
        logprobs, text = choice["logprobs"], choice["text"]
        size = 10 * echo + max_tokens
        assert {len(values) for values in logprobs.values()} == {size}
        for index, token in enumerate(logprobs["tokens"]):
            own, top = logprobs["token_logprobs"][index], logprobs["top_logprobs"][index]
            if echo and index == 0:
                assert (own, top) == (None, None)
            else:
                assert top[token] == own <= 0
                assert count <= len(top) <= count + 1 or count == 0
            if not token.startswith("bytes:"):
                assert text.startswith(token, logprobs["text_offset"][index])
        assert text.startswith("the 🥹 cat") == echo
    assert joined(chunks_of(client, **fields)) == body["choices"]


def test_prompt_logprobs_are_those_of_the_echo(client: TestClient) -> None:
    fields: dict[str, Any] = {"prompt": "the cat sat", "max_tokens": 1, "seed": 1}
    echoed = ask(client, echo=True, logprobs=2, **fields)["choices"][0]["logprobs"]
    choice = ask(client, prompt_logprobs=2, **fields)["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    ids = client.post("/tokenize", json={"prompt": "the cat sat"}).json()["tokens"]
    assert len(rest) == len(ids) - 1
    for index, (values, token_id) in enumerate(zip(rest, ids[1:], strict=True), 1):
        assert values[str(token_id)]["logprob"] == echoed["token_logprobs"][index]
        assert values[str(token_id)]["decoded_token"] == echoed["tokens"][index]
        assert [value["rank"] for value in values.values()][:2] == [1, 2]
        assert len(values) in (2, 3)
    streamed = chunks_of(client, prompt_logprobs=2, **fields)
    assert streamed[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert sum("prompt_logprobs" in chunk["choices"][0] for chunk in streamed) == 1
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "prompt_logprobs": 0, "max_tokens": 2}
    whole = client.post("/v1/chat/completions", json=body).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    chunks = chunks_of(client, "/v1/chat/completions", prompt=None, **body)
    assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [whole["prompt_logprobs"]]


def test_fields_beyond_openais(client: TestClient) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "logit_bias": {str(EOS_ID): 100}}
    assert ask(client, **fields)["usage"]["completion_tokens"] == 1
    assert ask(client, **fields, min_tokens=3)["usage"]["completion_tokens"] == 4
    shown = ask(client, **fields, ignore_eos=True, skip_special_tokens=False)
    assert shown["choices"][0]["text"] == "<|im_end|>" * 4
    stopped = ask(client, stop_token_ids=[5], logit_bias={"5": 100}, temperature=0)
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_an_echo_has_no_bos_that_was_not_sent(tmp_path: Path) -> None:
    directory = make_llama_directory(tmp_path).path
    write_tokenizer(directory, bos_token="<|endoftext|>", add_bos_token=True)
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    with serve_here(directory, max_model_len=128) as client:
        for prompt in ("the <|im_start|>cat", "🥹"):
            choice = ask(client, prompt=prompt, **fields)["choices"][0]
            assert choice["text"].startswith(prompt)
            tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert (tokens[0], offsets[:2]) == ("<|endoftext|>", [0, 0])
            assert offsets[-1] == len(prompt)
            ids = client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
            assert len(ids) == len(tokens) - 1
            as_ids = ask(client, prompt=ids, skip_special_tokens=False, **fields)["choices"][0]
            assert as_ids["text"] == "<|endoftext|>" + choice["text"]
            bare = ask(client, prompt=prompt, add_special_tokens=False, **fields)["choices"][0]
            assert bare["logprobs"]["tokens"][: len(ids) - 1] == tokens[1:-1]


def test_salts_keep_tenants_apart(client: TestClient) -> None:
    def cached(salt: str) -> int:
        usage = ask(client, prompt="salt " * 20, max_tokens=1, cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b"), cached("b"), cached("")] == [0, 96, 0, 96, 0]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "x"}, "suffix", "unknown field 'suffix'"),
    ({"messages": []}, "messages", "unknown field"),
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": 5}, "prompt", "must be text"),
    ({"prompt": {}}, "prompt", "must be text"),
    ({"prompt": ["a", 5]}, "prompt", "prompt[1] is a int"),
    ({"prompt": [[1], "a"]}, "prompt", "prompt[1] is a str"),
    ({"prompt": [1.5]}, "prompt", "prompt[0] is 1.5"),
    ({"prompt": [True]}, "prompt", "prompt[0] is True"),
    ({"prompt": ["a"] * 129}, "prompt", "129 prompts; at most 128"),
    ({"prompt": ["a"] * 9, "n": 128}, "n", "1152 answers; at most 1024"),
    ({"prompt": "\ud800"}, "prompt", "surrogate"),
    ({"prompt": ["a", "\ud800"]}, "prompt", "of prompt[1]: the text has a lone surrogate"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"echo": 1}, "echo", "valid boolean"),
    ({"best_of": 2}, "best_of", "best_of is 2"),
    ({"n": 2, "best_of": 3}, "best_of", "best_of is 3"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown field"),
    ({"min_tokens": 17}, "min_tokens", "no more than 16"),
    ({"stream_options": {}}, "stream_options", "needs stream"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024"),
    ({"stop_token_ids": [NUM_TOKENS]}, "stop_token_ids", str(NUM_TOKENS)),
    ({"grammar": "x"}, "grammar", "unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD, ids=[str(fields)[:40] for fields, _, _ in BAD])
def test_what_can_not_be_honoured(client: TestClient, fields: dict[str, Any], param: str, says: str) -> None:
    error = refused(client, **fields)
    assert error["param"] == param
    assert says in error["message"]


def test_best_of_n_and_nulls_are_fine(client: TestClient) -> None:
    nulls = dict.fromkeys(
        ["n", "suffix", "logprobs", "echo", "stop", "best_of", "seed", "cache_salt", "user"]
    )
    assert len(ask(client, n=2, best_of=2, max_tokens=1)["choices"]) == 2
    assert ask(client, **nulls, temperature=0)["usage"]["completion_tokens"] <= 16


def test_tokenize_and_back(client: TestClient) -> None:
    def tokenize(**fields: Any) -> Any:
        return client.post("/tokenize", json=fields).json()

    text = "the <|im_start|> 🥹 cat"
    body = tokenize(prompt=text)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), CONTEXT)
    assert NUM_TOKENS - 2 in body["tokens"]
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}
    assert tokenize(prompt=text, add_special_tokens=False)["tokens"] == body["tokens"]  # the model has no BOS
    messages = [{"role": "user", "content": "the cat"}]
    chat = tokenize(messages=messages)
    usage = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert tokenize(messages=messages, add_generation_prompt=False)["count"] < chat["count"]
    for bad, param in (
        ({}, "prompt"),
        ({"prompt": "a", "messages": messages}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": messages, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "what": 1}, "what"),
        ({"prompt": "x" * 100_000}, "prompt"),
    ):
        response = client.post("/tokenize", json=bad)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    for tokens in ([NUM_TOKENS], [-1], [2**62], ["a"], "text", None):
        response = client.post("/detokenize", json={"tokens": tokens})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("tokens")


def test_the_model_list(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == CONTEXT
    assert client.get(f"/v1/models/{model['id']}").json() == model
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
