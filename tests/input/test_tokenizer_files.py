"""A GGUF file's tokenizer as Hugging Face's files: read back, it is the same tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_tokenizers import PUBLISHED, gguf_metadata, strings
from tokenizers import Tokenizer as RustTokenizer

from octavo.input.gguf_tokenizer import parts_from_gguf
from octavo.input.tokenizer import Tokenizer
from octavo.input.tokenizer_files import tokenizer_files
from octavo.weights.gguf import GGUFFile

TEXTS = [
    "", " ", "  ", "Hello, world!", " leading", "trailing ", "a\n\n b\t c", "1234567", "naïve 你好 🫠 "
    "\u0000\u0007",
    "<|im_start|>user\nhi<|im_end|>\n", "<s>x</s>", "def f(x):\n    return x ** 2", "\u2581mark <0x41>",
]  # fmt: skip


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Metadata of a small SentencePiece BPE: bytes, letters and some words."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = [
        "\u2581",
        *"helowrd,!",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581w",
        "\u2581wo",
        "or",
        "ld",
        "\u2581world",
    ]
    pieces += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    } | changes


def marked() -> dict[str, Any]:
    """Metadata of a BPE in SentencePiece's alphabet."""
    plain = ["\u2581", *"helo", "he", "\u2581he"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * len(plain)],
        "tokenizer.ggml.merges": ["h e", "\u2581 he"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }


def written(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    for name, text in tokenizer_files(parts_from_gguf(metadata)).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.from_directory(folder)


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text), text
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False)
        ids = ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids)
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids, skip_special_tokens=False)
    for attribute in ("vocab_size", "bos_id", "adds_bos", "special_ids", "chat_templates"):
        assert getattr(theirs, attribute) == getattr(ours, attribute), attribute
    assert theirs.eos_ids[:1] == ours.eos_ids[:1]  # the others are generation_config.json's to say
    assert [theirs.token_bytes(i) for i in range(ours.vocab_size)] == [
        ours.token_bytes(i) for i in range(ours.vocab_size)
    ]


@pytest.mark.parametrize(
    "metadata",
    [
        sentencepiece(),
        sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}),
        sentencepiece(**{"tokenizer.ggml.add_bos_token": False}),
        marked(),
    ],
    ids=["sentencepiece", "no prefix", "no bos", "marked"],
)
def test_reads_back_as_it_was(metadata: dict[str, Any], tmp_path: Path) -> None:
    assert_same(Tokenizer.from_gguf(metadata), written(metadata, tmp_path))


def test_smollm2_reads_back_as_it_was(
    smollm2_gguf: GGUFFile, smollm2_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert_same(smollm2_tokenizer, written(dict(smollm2_gguf.metadata), tmp_path))


@pytest.mark.parametrize("metadata", [sentencepiece(), marked()], ids=["sentencepiece", "marked"])
def test_other_programs_add_bos_and_decode_as_we_do(metadata: dict[str, Any], tmp_path: Path) -> None:
    ours = written(metadata, tmp_path)
    theirs = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids)


#: The others take a while.
QUICK = ("deepseek_v3", "llama2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PUBLISHED]
)
def test_tokenizers_of_models_around(name: str, tmp_path: Path) -> None:
    metadata = gguf_metadata(name)
    first = metadata["tokenizer.ggml.token_type"].index(3)  # any control token will do for BOS
    metadata |= {"tokenizer.ggml.bos_token_id": first, "tokenizer.ggml.add_bos_token": True}
    ours, theirs = Tokenizer.from_gguf(metadata), written(metadata, tmp_path)
    library = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.special_ids == ours.special_ids
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    for text in strings(added, count=200):
        ids = ours.encode(text)
        assert theirs.encode(text) == library.encode(text).ids == ids, text
        for skip in (True, False):
            expected = ours.decode(ids, skip_special_tokens=skip)
            assert theirs.decode(ids, skip_special_tokens=skip) == expected, text
