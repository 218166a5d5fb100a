"""Putting an engine together: what a tokenizer's setting does, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import LLM
from octavo.errors import CheckpointError, ConfigError, UnsupportedModelError
from octavo.input.tokenizer import Tokenizer
from octavo.weights.gguf import GGUFFile
from tiny_models import make_llama_directory, write_tokenizer

SETTINGS = {"threads": 1, "max_model_len": 64, "backend": "torch"}


def with_pre_tokenizer(source: Path, directory: Path, name: bytes) -> Path:
    """A copy of a tiny GGUF file whose tokenizer.ggml.pre is another name of five letters."""
    data = source.read_bytes()
    assert data.count(b"gpt-2") == 1
    path = directory / "other.gguf"
    path.write_bytes(data.replace(b"gpt-2", name))
    return path


def test_an_unknown_pre_tokenizer_is_named_with_the_flag(tiny_path: Path, tmp_path: Path) -> None:
    path = with_pre_tokenizer(tiny_path, tmp_path, b"nope9")
    with pytest.raises(
        UnsupportedModelError, match=r"rules of 'nope9' .* name these with --pre-toke"
    ) as error:
        LLM(str(path), **SETTINGS)
    assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(ConfigError, match="--pre-tokenizer is 'llama'"):
        LLM(str(path), **SETTINGS, pre_tokenizer="llama")


def test_the_flag_says_how_text_is_cut(tiny_path: Path, tmp_path: Path) -> None:
    path = with_pre_tokenizer(tiny_path, tmp_path, b"nope9")
    text = " \n\n the"  # cut before the last space, or behind the last line feed
    for name in ("gpt-2", "llama-bpe"):
        expected = Tokenizer.from_gguf(GGUFFile.open(tiny_path).metadata, pre_tokenizer=name)
        with LLM(str(path), **SETTINGS, pre_tokenizer=name) as llm:
            assert llm._inputs.tokenizer.encode(text) == expected.encode(text)


def test_a_directory_says_itself_how_text_is_cut(tmp_path: Path) -> None:
    make_llama_directory(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"--pre-tokenizer is 'gpt-2', but .* is a directory"):
        LLM(str(tmp_path), **SETTINGS, pre_tokenizer="gpt-2")


def test_a_template_that_does_not_compile_is_an_error_of_the_file(tmp_path: Path) -> None:
    make_llama_directory(tmp_path)
    write_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(CheckpointError, match="chat template can't be compiled") as error:
        LLM(str(tmp_path), **SETTINGS)
    assert str(error.value).startswith(f"{tmp_path}: ")


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    make_llama_directory(tmp_path)
    write_tokenizer(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][0], "content": "<more>", "id": 262})
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=r"the tokenizer has 263 tokens, but the model has .* for 262"):
        LLM(str(tmp_path), **SETTINGS)
