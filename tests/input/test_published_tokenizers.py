"""Tokenizers of models around, from their own files and from GGUF metadata made of these. Oracle: the
`tokenizers` library reading the model's tokenizer.json; for templates, transformers."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_tokenizers import PUBLISHED, gguf_metadata, published, strings
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.input.chat_template import ChatTemplate
from octavo.input.tokenizer import Tokenizer
from octavo.output.detokenizer import Detokenizer
from octavo.weights.gguf import GGUFFile


@functools.cache
def library(name: str) -> RustTokenizer:
    return RustTokenizer.from_file(str(published(name) / "tokenizer.json"))


@functools.cache
def from_directory(name: str) -> Tokenizer:
    return Tokenizer.from_directory(published(name))


def assert_same(ours: Tokenizer, theirs: RustTokenizer) -> None:
    """Equal ids and equal text on more than 1,000 strings, added tokens among them."""
    for text in strings([token.content for token in theirs.get_added_tokens_decoder().values()]):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text
        detokenizer = Detokenizer(ours)
        deltas = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join([*deltas, detokenizer.finish()]) == theirs.decode(ids), text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_directory_is_read_as_the_library_reads_it(name: str) -> None:
    assert_same(from_directory(name), library(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_gguf_metadata_gives_the_ids_of_the_models_own_file(name: str) -> None:
    ours = Tokenizer.from_gguf(gguf_metadata(name))
    assert_same(ours, library(name))
    assert ours.special_ids == from_directory(name).special_ids


def test_smollm2_as_its_own_file_has_it(smollm2_gguf: GGUFFile, smollm2_tokenizer: Tokenizer) -> None:
    """Its tokenizer.json is built here once more: digits one by one, then GPT-2's words."""
    metadata = smollm2_gguf.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    theirs = RustTokenizer(models.BPE(vocab=vocab, merges=merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    theirs.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    theirs.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    assert_same(smollm2_tokenizer, theirs)


_PIECES = st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\u2581"), max_size=12)
#: Assigned characters (libraries disagree on others), and words and spaces as texts have them.
texts = st.lists(_PIECES | st.sampled_from([*" \n\t0", "  ", "the", " The", "123", "don't", "🥹", "龜"])).map(
    "".join
)


@pytest.mark.parametrize("name", PUBLISHED)
@given(text=texts)
def test_text_survives_the_round_trip(name: str, text: str) -> None:
    ours = from_directory(name)
    expected = unicodedata.normalize("NFC", text) if name == "qwen3" else text
    assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == expected


def test_a_real_gemma_file_gives_the_ids_of_the_models_own(gemma3_path: Path) -> None:
    """Its kind is "llama": pieces with scores instead of merges. It marks more tokens as special."""
    with GGUFFile.open(gemma3_path) as file:
        ours, theirs = Tokenizer.from_gguf(file.metadata), library("gemma3")
    for text in strings([token.content for token in theirs.get_added_tokens_decoder().values()]):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert (ours.bos_id, ours.adds_bos) == (2, True)
    assert ours.eos_ids == (1, 106)  # <eos>, and the <end_of_turn> that only chat formats write


@pytest.mark.parametrize("name", ["llama2", "gemma3"])
@given(data=st.data())
@settings(max_examples=200)
def test_any_ids_decode_as_the_library_decodes_them(name: str, data: st.DataObject) -> None:
    """Byte tokens that make no character apart: the library gives up the whole run of them then."""
    theirs, ours = library(name), from_directory(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 5), max_size=30))
    run: bytes = b""
    for token_id in [*ids, -1]:
        token = theirs.id_to_token(token_id) if token_id >= 0 else None
        if token is not None and re.fullmatch("<0x..>", token):
            run += bytes.fromhex(token[3:5])
            continue
        ids = ids if run.decode(errors="ignore").encode() == run else []
        run = b""
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_facts_in_the_configs() -> None:
    facts = {
        name: (from_directory(name).bos_id, from_directory(name).eos_ids, from_directory(name).adds_bos)
        for name in PUBLISHED
    }
    assert facts == {
        "llama3": (128000, (128001,), False),
        "qwen3": (None, (151645,), False),
        "gptoss": (199998, (200002,), False),
        "deepseek_v3": (0, (1,), True),
        "llama2": (1, (2,), True),
        "gemma3": (2, (106,), True),
    }


USER = {"role": "user", "content": "What's 2+2?"}
ASSISTANT = {"role": "assistant", "content": "It is "}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": [USER], "add_generation_prompt": True},
        {"messages": [USER, ASSISTANT, USER], "add_generation_prompt": False},
        {"messages": [USER, ASSISTANT], "continue_final_message": True},
        {"messages": [USER], "tools": [TOOL], "add_generation_prompt": True},
        {"messages": [USER], "add_generation_prompt": True, "enable_thinking": False},
    ],
    ids=["prompt", "turns", "continue", "tools", "kwargs"],
)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3", "gemma3"])
def test_templates_render_as_transformers_does(name: str, kwargs: dict[str, Any]) -> None:
    ours = from_directory(name)
    assert ours.bos_id is not None or name == "qwen3"
    config = json.loads((published(name) / "tokenizer_config.json").read_bytes())
    tokens = {key: config.get(key) or "" for key in ("bos_token", "eos_token")}
    tokens = {key: token if isinstance(token, str) else token["content"] for key, token in tokens.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        theirs = PreTrainedTokenizerFast(tokenizer_object=RustTokenizer(models.BPE()), **tokens)
        source = ours.chat_templates["default"]
        expected = theirs.apply_chat_template(
            kwargs["messages"],
            chat_template=source,
            tokenize=False,
            **{key: value for key, value in kwargs.items() if key != "messages"},
        )
    template = ChatTemplate(ours.chat_templates, **tokens)
    thinking = {key: value for key, value in kwargs.items() if key == "enable_thinking"}
    others = {key: value for key, value in kwargs.items() if key not in thinking}
    assert template.render(**others, chat_template_kwargs=thinking) == expected
