"""Reads tokenizer.model. Oracle: the sentencepiece package, with tiny models that it trains."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.input.sentencepiece import parse_sentencepiece
from octavo.input.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece", reason="the oracle; `make` installs it")

_TEXT = """
    the cat sat on a mat while nobody knew why it was there and what they would do then naïve café straße
    über привет мир 12 345 don't it's hello, world! (yes) def return None 日本語 你好 世界
"""
WORDS = _TEXT.split()
VARIANTS: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "no prefix": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    },
    "user defined": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>", "\n"],
    },
    "unknown": {"model_type": "bpe", "character_coverage": 0.98},
}
texts = st.text(st.sampled_from("the catsonmwhiluvyé ß世界日.,!12\n🙂  "), max_size=40) | st.lists(
    st.sampled_from(WORDS), max_size=12
).map(" ".join)


def train(**options: Any) -> bytes:
    rng = random.Random(3)
    lines = [" ".join(rng.choices(WORDS, k=12)) for _ in range(400)]
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        **{"vocab_size": 420, "hard_vocab_limit": False, "minloglevel": 2, **options},
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest) -> bytes:
    return train(**VARIANTS[request.param])


@pytest.fixture(scope="module")
def ours(model: bytes, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("model")
    (path / "tokenizer.model").write_bytes(model)
    return Tokenizer.from_directory(path)


@pytest.fixture(scope="module")
def theirs(model: bytes) -> Any:
    return spm.SentencePieceProcessor(model_proto=model)


@given(text=texts)
@settings(max_examples=300)
def test_encodes_and_decodes_as_sentencepiece_does(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    if theirs.unk_id() not in ids:  # which sentencepiece shows as text
        assert ours.decode(ids) == theirs.decode(ids)


def test_facts_of_a_model(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (1, (2,), True)
    assert ours.special_ids == {0, 1, 2}
    assert ours.encode("a")[0] == 1
    assert ours.encode("<s>", add_special_tokens=False) == [1]


def test_tokens_beside_the_model_are_added(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data := train(**VARIANTS["bpe"]))
    size = len(parse_sentencepiece(data).pieces)
    added = {str(size): {"content": "<|im_start|>", "special": True}, str(size + 1): {"content": "<x>"}}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_start|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("<|im_start|>the<x>")
    assert (ids[0], ids[-1]) == (size, size + 1)
    assert tokenizer.decode(ids) == "the<x>"
    assert tokenizer.eos_ids == (size,)


def test_eos_ids_are_the_models_and_those_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(**VARIANTS["bpe"]))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == (2, 5, 7)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert Tokenizer.from_directory(tmp_path).eos_ids == (1, 5, 2, 7)


def test_gguf_metadata_gives_the_same_ids(tmp_path: Path) -> None:
    data = train(**{**VARIANTS["bpe"], "remove_extra_whitespaces": False})
    model = parse_sentencepiece(data)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": model.pieces,
        "tokenizer.ggml.scores": model.scores,
        "tokenizer.ggml.token_type": model.kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    bare = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_space_prefix": False})
    oracle = spm.SentencePieceProcessor(model_proto=data)
    rng = random.Random(1)
    for _ in range(200):
        text = rng.choice([" ", "  "]).join(rng.choices(WORDS, k=5)) + rng.choice(["", " ", "\n", "🙂"])
        assert tokenizer.encode(text) == [1, *oracle.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert bare.decode(bare.encode(" " + text)) == " " + text
        assert bare.encode(" " + text) == tokenizer.encode(text)
    assert tokenizer.eos_ids == (2,)


def test_word_and_character_models_are_refused() -> None:
    for kind in ("word", "char"):
        with pytest.raises(UnsupportedModelError, match="SentencePiece model of type"):
            parse_sentencepiece(train(model_type=kind))


@functools.cache
def small_model() -> bytes:
    return train(model_type="bpe", vocab_size=80)


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


PIECE = field(1, b"a")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "no pieces"),
        (b"\xff" * 20, "does not end"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\x7fabc", "has 127 bytes, but 3 are left"),
        (b"\x08\x01", "text field holds a number"),
        (field(1, b""), "piece 0 has 0 characters"),
        (field(1, field(1, b"\xff")), "piece 0 is no UTF-8"),
        (field(1, PIECE + b"\x18\x09"), "piece 0 is of kind 9"),
        (field(1, PIECE + b"\x10\x09"), "score of piece 0 is no float"),
        (field(1, PIECE + b"\x15" + struct.pack("<f", float("nan"))), "score nan"),
    ],
)
def test_damaged_files_are_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        parse_sentencepiece(data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: "):
        Tokenizer.from_directory(tmp_path)


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_model_or_refused(data: bytes) -> None:
    assert_read_or_refused(data)


@given(data=st.data())
@settings(max_examples=50)
def test_a_model_with_any_byte_changed_is_read_or_refused(data: st.DataObject) -> None:
    model = bytearray(small_model())
    model[data.draw(st.integers(0, len(model) - 1))] = data.draw(st.integers(0, 255))
    assert_read_or_refused(bytes(model))


def assert_read_or_refused(data: bytes) -> None:
    """Whatever else is raised fails the test."""
    built = None
    with contextlib.suppress(CheckpointError, UnsupportedModelError):
        built = parse_sentencepiece(data).build()
    assert built is None or built.get_vocab_size() > 0
