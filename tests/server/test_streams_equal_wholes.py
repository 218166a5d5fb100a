"""A stream adds up to the answer that is not streamed, byte for byte.

The tiny model's tokens are single bytes and its weights random, so that its answers are full of half
characters; what is drawn here makes them fuller, with stops that are likely to be met.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from serving import serve_here

PIECES = [
    "🫠",
    "🥹",
    "龜",
    "日本語",
    "é",
    "e\u0301",
    "n\u0303o",
    "👩‍👩‍👧",
    "🇫🇷",
    "ا",
    "the ",
    "\n",
    "\u200d",
    "\ufeff",
]
#: Bytes of long characters, as tokens, and the bias that makes them likely.
WIDE = {str(byte): 4 for byte in [0xF0, 0x9F, 0xA5, 0xB9, 0xE9, 0xBE, 0x9C, 0xCC, 0x81, *range(0x80, 0x90)]}
CASES = 200


@pytest.fixture(scope="module")
def client(tiny_path: Path) -> Iterator[TestClient]:
    with serve_here(tiny_path) as client:
        yield client


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a request."""
    text = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
    stops = [
        rng.choice(["\ufffd", "🥹", "é", "t", "\n", "龜", "\ufffd\ufffd", "e\u0301", "x\ufffd"])
        for _ in range(2)
    ]
    body: dict[str, Any] = {
        "temperature": 1.5,
        "seed": rng.randrange(10**6),
        "max_tokens": rng.choice([1, 2, 3, 17, 40]),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "stop": rng.choice([None, stops[:1], stops]),
        "logit_bias": rng.choice([{}, WIDE]),
        "skip_special_tokens": rng.random() < 0.7,
    }
    if body["stop"] is not None and rng.random() < 0.3:
        body["include_stop_str_in_output"] = True
    if rng.random() < 0.3:
        body["min_tokens"] = rng.randint(0, body["max_tokens"])
    if rng.random() < 0.5:
        logprobs = {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if rng.random() < 0.5 else {}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body, **logprobs}
    logprobs = {"logprobs": rng.randint(0, 3)} if rng.random() < 0.5 else {}
    return "/v1/completions", {"prompt": text, "echo": rng.random() < 0.4, **body, **logprobs}


def streamed(client: TestClient, path: str, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """What a stream's chunks say in all, by choice: text, logprobs, why it ended; and the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = client.post(path, json={**body, **options}).content.decode("utf-8", errors="strict")
    *chunks, last = [json.loads(event[6:]) for event in events.split("\n\n")[:-2]]
    assert last["choices"] == []
    said: dict[int, list[Any]] = {}
    for chunk in chunks:
        assert chunk["usage"] is None
        for piece in chunk["choices"]:
            choice = said.setdefault(piece["index"], ["", None, None])
            assert choice[2] is None, "nothing comes after the end"
            choice[0] += piece["delta"].get("content", "") if "delta" in piece else piece["text"]
            for name, values in (piece["logprobs"] or {}).items():
                choice[1] = choice[1] or {}
                choice[1][name] = choice[1].get(name, []) + values
            choice[2] = piece["finish_reason"]
    return [said[index] for index in sorted(said)], last["usage"]


@pytest.mark.parametrize("part", range(4))
def test_any_of_many_requests(client: TestClient, part: int) -> None:
    stopped = 0
    for seed in range(part, CASES, 4):
        path, body = draw(random.Random(seed))
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer = json.loads(response.content.decode("utf-8", errors="strict"))
        whole = [
            [choice["message"]["content"] if "message" in choice else choice["text"], choice["logprobs"],
             choice["finish_reason"]]
            for choice in answer["choices"]
        ]  # fmt: skip
        choices, usage = streamed(client, path, body)
        assert choices == whole, f"seed {seed}: {body}"
        answer["usage"].pop("prompt_tokens_details")  # the second finds more cached
        usage.pop("prompt_tokens_details")
        assert usage == answer["usage"]
        stopped += any(reason == "stop" for _, _, reason in whole) and body["stop"] is not None
    assert stopped > 5
