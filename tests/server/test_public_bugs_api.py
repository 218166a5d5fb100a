"""Bugs that other engines' users reported, by their number in our list: what is right here.

Each is tried in several ways, since the next of its kind will not look the same. Requests that are to be
refused are in test_public_bugs_refused.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from serving import ENDLESS, serve_here
from tiny_models import EOS_ID, NUM_TOKENS, make_llama_directory, write_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with serve_here(tiny_path) as client:
        yield client


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Iterator[TestClient]:
    """SmolLM2, whose answers mean something."""
    with serve_here(smollm2_path, max_model_len=512, kv_cache_gib=0.1) as client:
        yield client


def post(client: TestClient, path: str, **fields: Any) -> Any:
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return json.loads(response.content.decode("utf-8", errors="strict"))


def chunks_of(client: TestClient, path: str, **fields: Any) -> list[Any]:
    response = client.post(path, json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    events = response.content.decode("utf-8", errors="strict").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_of(chunks: list[Any], index: int = 0) -> str:
    pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in pieces)


# -- 1: characters that are several tokens -----------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("content", ["Repeat: 🫠🥹龜", "👩‍👩‍👧👩‍👩‍👧", "é\u0301ñ\u0303"])
def test_bug_1_cut_within_a_character(real: TestClient, content: str, max_tokens: int) -> None:
    bias = {"logit_bias": {str(i): 10 for i in _ids(real, content)}, "seed": 3}
    fields = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **bias}
    body = post(real, CHAT, **fields, logprobs=True, top_logprobs=2)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    text = choice["message"]["content"]
    assert text_of(chunks_of(real, CHAT, **fields)) == text
    raw = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert raw.decode(errors="replace") == text


def _ids(client: TestClient, text: str) -> list[int]:
    ids: list[int] = post(client, "/tokenize", prompt=text)["tokens"]
    return ids


# -- 3, 5: stops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["DEFGHIJ", "D E F", "GHI", " E F G H"])
def test_bug_3_nothing_of_a_stop_leaks(real: TestClient, stop: str) -> None:
    prompt = "A B C D E F G H I J K L M N\n" * 3 + "A B C"
    fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 30}
    free = post(real, COMPLETIONS, **fields)["choices"][0]["text"]
    assert " D E F G H" in free
    chunks = chunks_of(real, COMPLETIONS, **fields, stop=stop)
    assert text_of(chunks) == free.split(stop)[0]
    for chunk in chunks:
        assert not any(chunk["choices"][0]["text"].endswith(stop[:k]) for k in range(2, len(stop)))
    assert chunks[-1]["choices"][0]["finish_reason"] == ("stop" if stop in free else "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\n"], "logit_bias": {"10": 100}},
        {"stop": ["\n\n", "\n"], "logit_bias": {"10": 100}},
        {"logit_bias": {str(EOS_ID): 100}},
        {"stop_token_ids": [65, 66], "logit_bias": {"65": 100, "66": 99}},
        {"stop": ["é"], "stop_token_ids": [7], "logit_bias": {"7": 100, "195": 90, "169": 90}},
    ],
    ids=str,
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_bug_5_nothing_ends_before_min_tokens(client: TestClient, route: str, fields: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": HI} if route == CHAT else {"prompt": "the cat"}
    fields = {**prompt, "max_tokens": 230, "seed": 1, **fields}
    early = post(client, route, **fields)
    assert early["usage"]["completion_tokens"] < 200
    late = post(client, route, **fields, min_tokens=200)
    assert 200 <= late["usage"]["completion_tokens"] <= 230
    streamed = chunks_of(client, route, **fields, min_tokens=200)
    choice = late["choices"][0]
    assert text_of(streamed) == (choice["message"]["content"] if route == CHAT else choice["text"])


def test_bug_5_a_stop_that_began_before_min_tokens(client: TestClient) -> None:
    always_a = {"temperature": 0, "logit_bias": {"97": 100}, "max_tokens": 40}
    for min_tokens, text in ((10, "a" * 7), (3, "a" * 0), (4, "a")):
        body = post(client, COMPLETIONS, prompt="x", stop="aaa", min_tokens=min_tokens, **always_a)
        assert body["choices"][0]["text"] == text
        assert body["usage"]["completion_tokens"] == min_tokens


# -- 6: usage of streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_bug_6_no_usage_unless_asked(client: TestClient, route: str, n: int, options: Any) -> None:
    prompt: dict[str, Any] = {"messages": HI} if route == CHAT else {"prompt": "the cat"}
    chunks = chunks_of(client, route, **prompt, n=n, max_tokens=3, stream_options=options)
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)
    *chunks, last = chunks_of(
        client, route, **prompt, n=n, max_tokens=3, stream_options={"include_usage": True}
    )
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] <= 3 * n


# -- 8, 10: logprobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": None}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_bug_8_logprobs_without_alternatives(client: TestClient, fields: dict[str, Any], n: int) -> None:
    body = post(client, CHAT, messages=HI, logprobs=True, max_tokens=5, n=n, logit_bias=ENDLESS, **fields)
    for choice in body["choices"]:
        content = choice["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in content] == [[]] * 5
        assert all(entry["logprob"] <= 0 for entry in content)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_bug_8_completions_with_logprobs_0(client: TestClient, echo: bool, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": "the cat", "logprobs": 0, "max_tokens": 5, "echo": echo, "seed": 1}
    if stream:
        chunks = chunks_of(client, COMPLETIONS, **fields)
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        logprobs = {name: [v for piece in pieces for v in piece[name]] for name in pieces[0]}
    else:
        logprobs = post(client, COMPLETIONS, **fields)["choices"][0]["logprobs"]
    known = list(zip(*logprobs.values(), strict=True))[1 if echo else 0 :]
    assert len(known) == 5 + 4 * echo
    assert all(top == {token: logprob} for token, logprob, top, _ in known)


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_bug_10_echo_alone(client: TestClient, logprobs: int | None, n: int, stream: bool) -> None:
    fields = {"prompt": "the cat sat", "echo": True, "max_tokens": 0, "logprobs": logprobs, "n": n}
    if stream:
        chunks = chunks_of(client, COMPLETIONS, **fields, stream_options={"include_usage": True})
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
    else:
        body = post(client, COMPLETIONS, **fields)
        choices, usage = body["choices"], body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 0)
    assert len(choices) == n
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == ("the cat sat", "length")
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert len(choice["logprobs"]["tokens"]) == 9
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert "".join(choice["logprobs"]["tokens"]) == "the cat sat"


# -- 12, 13, 14: sampling -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields", [{"n": 4, "seed": 1}, {"n": 4, "seed": 2**64 - 1}, {"n": 9, "seed": 0}], ids=str
)
def test_bug_12_n_answers_differ_and_repeat(client: TestClient, route: str, fields: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": HI} if route == CHAT else {"prompt": "the cat " * 10}
    fields = {**prompt, **fields, "temperature": 1, "max_tokens": 60}
    first, again = post(client, route, **fields), post(client, route, **fields)
    assert first["choices"] == again["choices"]
    texts = [choice["message"]["content"] if route == CHAT else choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == fields["n"]
    assert [choice["index"] for choice in first["choices"]] == list(range(fields["n"]))
    chunks = chunks_of(client, route, **fields)
    assert [text_of(chunks, index) for index in range(fields["n"])] == texts
    alone = post(client, route, **fields | {"n": 1})["choices"][0]
    assert alone == first["choices"][0], "the first answer is that of n = 1"
    assert (
        first["usage"]["prompt_tokens"] == post(client, route, **fields | {"n": 1})["usage"]["prompt_tokens"]
    )


def test_bug_12_each_ends_on_its_own(client: TestClient) -> None:
    body = post(client, COMPLETIONS, prompt="x", n=16, seed=3, max_tokens=60, stop="t", temperature=1.5)
    reasons = {choice["finish_reason"] for choice in body["choices"]}
    assert reasons == {"stop", "length"}
    assert body["usage"]["completion_tokens"] < 16 * 60


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 0.9, "presence_penalty": 0.5},
        {"frequency_penalty": 1.5},
    ],
    ids=str,
)
def test_bug_13_penalties_with_a_warm_cache(client: TestClient, fields: dict[str, Any]) -> None:
    prompt = "the cat sat on the mat, the cat sat on the mat"
    salt = str(fields)  # so that the first finds nothing cached
    asked = {
        "prompt": prompt,
        "cache_salt": salt,
        "temperature": 0,
        "max_tokens": 30,
        "logprobs": 2,
        **fields,
    }
    cold, warm = post(client, COMPLETIONS, **asked), post(client, COMPLETIONS, **asked)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"] == warm["choices"]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_bug_13_what_penalties_cover(client: TestClient, name: str) -> None:
    """The likeliest next token is one of the prompt: only repetition_penalty covers it."""
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    first = post(client, COMPLETIONS, prompt="the cat", logprobs=0, **greedy)["choices"][0]
    (token,) = first["logprobs"]["tokens"]
    byte = int(token[-2:], 16) if token.startswith("bytes:") else ord(token)
    again = {"prompt": [byte, byte, byte], "logit_bias": {str(byte): 60}, **greedy}
    strong = 100.0 if name == "repetition_penalty" else 2.0
    plain = post(client, COMPLETIONS, **again)["choices"]
    penalised = post(client, COMPLETIONS, **again, **{name: strong})["choices"]
    assert (penalised != plain) == (name == "repetition_penalty")


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-4}, {"temperature": 1, "top_p": 1e-4}, {"temperature": 1e-6}, {"top_k": 1},
     {"temperature": 5e-324}, {"min_p": 1.0}],
    ids=str,
)  # fmt: skip
def test_bug_14_nearly_greedy_is_greedy(client: TestClient, fields: dict[str, Any]) -> None:
    asked = {"prompt": "the cat", "max_tokens": 20, "logprobs": 1, "seed": 9}
    greedy = post(client, COMPLETIONS, **asked, temperature=0)["choices"]
    assert post(client, COMPLETIONS, **asked, **fields)["choices"] == greedy


def test_bug_14_greedy_rows_beside_others(client: TestClient) -> None:
    greedy: dict[str, Any] = {"prompt": "the cat", "max_tokens": 20, "temperature": 0}
    alone = post(client, COMPLETIONS, **greedy)["choices"][0]["text"]
    mixed = [post(client, COMPLETIONS, **greedy, n=4)["choices"] for _ in range(2)]
    assert {choice["text"] for choices in mixed for choice in choices} == {alone}


# -- 22, 24, 26: templates ----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [["the", "cat"], ["the"], ["a", "", "🥹"]])
def test_bug_24_parts_are_flattened(client: TestClient, parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    flat = post(client, "/tokenize", messages=[{"role": "user", "content": "\n".join(parts)}])
    assert post(client, "/tokenize", messages=[{"role": "user", "content": content}]) == flat
    answer = post(client, CHAT, messages=[{"role": "user", "content": content}], max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == flat["count"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return make_llama_directory(tmp_path_factory.mktemp("plain")).path


def test_bug_22_a_model_without_a_template(directory: Path, tmp_path: Path) -> None:
    write_tokenizer(directory, chat_template=None)
    with serve_here(directory, max_model_len=512) as client:
        for body in ({"messages": HI}, {"messages": HI, "stream": True}, {"messages": HI, "n": 2}):
            response = client.post(CHAT, json=body)
            assert response.status_code == 400
            assert "--chat-template" in response.json()["error"]["message"]
        assert client.post("/tokenize", json={"messages": HI}).status_code == 400
        assert post(client, COMPLETIONS, prompt="the cat", max_tokens=2)["choices"]
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    with serve_here(directory, max_model_len=512, chat_template=str(template)) as client:
        assert post(client, CHAT, messages=HI, max_tokens=2)["choices"]
        ids = post(client, "/tokenize", messages=HI)["tokens"]
        assert post(client, "/detokenize", tokens=ids)["prompt"] == "[user] the cat"


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}"])
def test_bug_26_one_bos(directory: Path, adds_bos: bool, written: str) -> None:
    from transformers import AutoTokenizer

    template = written + (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    )
    write_tokenizer(
        directory, chat_template=template, bos_token="<|endoftext|>", add_bos_token=adds_bos,
        tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    with serve_here(directory, max_model_len=512) as client:
        ids = post(client, "/tokenize", messages=HI)["tokens"]
        usage = post(client, CHAT, messages=HI, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert ids.count(NUM_TOKENS - 3) == (adds_bos or bool(written))
    if written.count("bos") == 1:
        oracle = AutoTokenizer.from_pretrained(directory)
        assert oracle.apply_chat_template(HI, tokenize=True, return_dict=False) == ids
