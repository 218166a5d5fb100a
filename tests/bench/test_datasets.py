"""Made-up prompts and files of conversations."""

from __future__ import annotations

import json
import random
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.datasets import Job, Lengths, conversations, synthetic
from octavo.errors import ConfigError
from octavo.input.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [("128", Lengths(128, 128)), ("32:256", Lengths(32, 256)), ("log:1:1000", Lengths(1, 1000, log=True))],
)
def test_lengths(text: str, expected: Lengths) -> None:
    assert Lengths.parse(text, "--x") == expected


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "0", "5:4", "-1", "1.5", "log", "log:", "²", "1:", " 1"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--x is "):
        Lengths.parse(text, "--x")


def test_uniform_and_log_uniform() -> None:
    rng = random.Random(0)
    uniform = [Lengths(10, 1000).draw(rng) for _ in range(4000)]
    logarithmic = [Lengths(10, 1000, log=True).draw(rng) for _ in range(4000)]
    for drawn in (uniform, logarithmic):
        assert 10 <= min(drawn) < 30
        assert 950 < max(drawn) <= 1000
    assert 480 < sorted(uniform)[2000] < 530  # the middle of the range
    assert 90 < sorted(logarithmic)[2000] < 110  # its geometric middle


def jobs(count: int, **arguments: Any) -> list[Job]:
    lengths = {"prompt_words": Lengths(50, 90), "max_tokens": Lengths(3, 9)}
    return list(islice(synthetic(**(lengths | arguments)), count))


def test_a_seed_repeats_the_prompts() -> None:
    assert jobs(20, seed=3) == jobs(20, seed=3) != jobs(20, seed=4)
    for job in jobs(50):
        assert 50 <= len(job.prompt.split()) <= 90
        assert 3 <= job.max_tokens <= 9


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_of_a_prefix(share: float) -> None:
    first, *others = [job.prompt.split() for job in jobs(20, shared_prefix=share)]
    for other in others:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, other, strict=False)))
        expected = round(share * min(len(first), len(other)))
        assert expected - 1 <= same <= expected + 5  # words may be alike by chance


def test_a_word_is_a_token(smollm2_tokenizer: Tokenizer) -> None:
    for job in jobs(20):
        assert len(smollm2_tokenizer.encode(job.prompt)) == pytest.approx(len(job.prompt.split()), rel=0.05)


def entry(question: str, reply: str, **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]
    return {"conversations": turns, **more}


def write(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "data.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_conversations(tmp_path: Path) -> None:
    entries = [entry(f"question {i}", "one two three " * (i + 1), id=i) for i in range(10)]
    system = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]}
    path = write(tmp_path, [*entries, system, {"conversations": []}, entry("", "no question")])
    found = list(islice(conversations(path, seed=1), 20))
    assert {job.prompt for job in found[:10]} == {f"question {i}" for i in range(10)}
    assert {(job.prompt, job.max_tokens) for job in found} == {
        (f"question {i}", 4 * (i + 1)) for i in range(10)
    }
    assert found == list(islice(conversations(path, seed=1), 20))
    assert found[:10] != found[10:] != list(islice(conversations(path, seed=2), 10))


def test_the_length_of_an_answer(tmp_path: Path) -> None:
    path = write(tmp_path, [entry("q", "a b c", max_tokens=77), entry("r", "")])
    assert {job.max_tokens for job in islice(conversations(path), 2)} == {77, 1}
    assert {job.max_tokens for job in islice(conversations(path, max_tokens=Lengths(5, 5)), 2)} == {5}


BAD: list[tuple[Any, str]] = [
    ("{", "can't read the dataset"),
    ("[" * 100_000, "can't read the dataset"),
    ({}, "is a JSON list, and this is a dict"),
    ([], "no entry begins with a question"),
    ([entry("q", "a"), 7], 'entry 1 has no list "conversations"'),
    ([entry("q", "a"), {"conversations": "x"}], 'entry 1 has no list "conversations"'),
    ([{"conversations": [{"from": "human"}]}], 'entry 0: turn 0 needs texts as "from" and "value"'),
    ([{"conversations": [{"from": "human", "value": "q"}, 5]}], "entry 0: turn 1 needs"),
    ([entry("q", "a", max_tokens=0)], 'entry 0: "max_tokens" is 0'),
    ([entry("q", "a", max_tokens=True)], '"max_tokens" is True'),
    ([{"conversations": [{"from": 3, "value": "v" * 9000}]}], "entry 0: turn 0"),
]


@pytest.mark.parametrize(("value", "says"), BAD, ids=[says[:30] for _, says in BAD])
def test_a_file_that_is_no_dataset(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        conversations(write(tmp_path, value))
    assert says in str(raised.value)
    assert "data.json" in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the dataset"):
        conversations(tmp_path / "none.json")
