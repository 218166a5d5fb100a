"""Tokenises with SmolLM2's vocabulary. Oracles: byte-pair encoding written out naively below, the
`tokenizers` decoder, and transformers' own GGUF loader where that one is right (no digits)."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, ConfigError, InvalidRequestError, UnsupportedModelError
from octavo.input.pre_tokenizers import PRE_TOKENIZERS
from octavo.input.tokenizer import Tokenizer
from octavo.weights.gguf import GGUFFile

#: SmolLM2 has no token for these bytes: unused in UTF-8, or too rare for its training text.
BYTES_WITHOUT_TOKEN = b"\x04\x06\x13\x14\x16\x1d\xc0\xc1\xf1\xf2\xf5\xf6\xf7\xf8\xf9\xfa\xfb\xfc\xfd\xfe\xff"

#: Assigned characters only: libraries know different versions of Unicode, and disagree on the rest.
#: Special tokens written out have a test of their own (Hypothesis tries strings it finds in the code).
texts = st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60).filter(
    lambda text: not set(text.encode()) & set(BYTES_WITHOUT_TOKEN) and not regex.search(r"<\|?\w+\|?>", text)
)
prose = st.text(st.sampled_from("abcdeTHE  \n\t'sdmr.,!?-_(){}0123456789éß中文🙂"), max_size=200)

SENTENCES = [
    "Hello world",
    "It's 2026, and there're 12345 ways: don't panic!",
    "  leading, trailing   ",
    "def f(x):\n    return x ** 2  # ok\n\n\n",
    "🫠 🥹 龜 👩‍👩‍👧‍👦 é ñ ½ ² Ⅷ ١٢٣",
    "\u00a0\u2003\u3000wide spaces\r\n",
]

GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte, in order."""
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(free)) for byte in range(256)]


@pytest.fixture(scope="module")
def naive_encode(smollm2_gguf: GGUFFile) -> Callable[[str], list[int]]:
    """Byte-pair encoding as the paper tells it: merge the best-ranked neighbours, again and again."""
    metadata = smollm2_gguf.metadata
    ids = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    alphabet = byte_alphabet()

    def encode_word(word: str) -> list[int]:
        parts = [alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        pieces = regex.split(r"(\p{N})", text)
        return [i for piece in pieces for word in GPT2_WORDS.findall(piece) for i in encode_word(word)]

    return encode


@given(text=texts | prose)
@settings(max_examples=300)
def test_encodes_as_naive_byte_pair_encoding_does(
    smollm2_tokenizer: Tokenizer, naive_encode: Callable[[str], list[int]], text: str
) -> None:
    assert smollm2_tokenizer.encode(text) == naive_encode(text)


@pytest.mark.parametrize("text", SENTENCES)
def test_sentences(smollm2_tokenizer: Tokenizer, naive_encode: Callable[[str], list[int]], text: str) -> None:
    ids = smollm2_tokenizer.encode(text)
    assert ids == naive_encode(text)
    assert smollm2_tokenizer.decode(ids) == text


@given(text=texts | prose)
@settings(max_examples=300)
def test_text_survives_the_round_trip(smollm2_tokenizer: Tokenizer, text: str) -> None:
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_facts_of_smollm2(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.vocab_size == 49152
    assert smollm2_tokenizer.bos_id == 1
    assert not smollm2_tokenizer.adds_bos
    assert smollm2_tokenizer.eos_ids == (2, 0)  # <|im_end|>, then <|endoftext|>
    assert smollm2_tokenizer.special_ids == frozenset(range(17))
    assert smollm2_tokenizer.max_token_bytes == 81
    one, two = smollm2_tokenizer.encode("1"), smollm2_tokenizer.encode("2")
    space = smollm2_tokenizer.encode(" ")
    assert smollm2_tokenizer.encode("1221 12") == [*one, *two, *two, *one, *space, *one, *two]


def test_special_tokens_in_text_are_these_tokens(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2_tokenizer.decode(ids) == "user\nhi"
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


@pytest.mark.parametrize("byte", BYTES_WITHOUT_TOKEN[:6])
def test_bytes_without_a_token_are_left_out(smollm2_tokenizer: Tokenizer, byte: int) -> None:
    assert smollm2_tokenizer.encode(f"a{chr(byte)}") == smollm2_tokenizer.encode("a")


def test_surrogates_are_refused_with_their_place(smollm2_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83E\) at character 2"):
        smollm2_tokenizer.encode("ab\ud83e")


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_decodes_as_the_tokenizers_library_does(smollm2_tokenizer: Tokenizer, ids: list[int]) -> None:
    library = smollm2_tokenizer._engine
    assert smollm2_tokenizer.decode(ids) == library.decode(ids)
    ordinary = [token_id for token_id in ids if token_id >= 17]
    assert smollm2_tokenizer.decode(ordinary, skip_special_tokens=False) == library.decode(ordinary)


def test_token_bytes(smollm2_tokenizer: Tokenizer) -> None:
    assert smollm2_tokenizer.token_bytes(2) == b"<|im_end|>"
    for text in ("🫠", "🥹", "龜"):
        ids = smollm2_tokenizer.encode(text)
        assert len(ids) == 3
        assert b"".join(map(smollm2_tokenizer.token_bytes, ids)) == text.encode()
    for beyond in (49152, 60000, -1):
        assert smollm2_tokenizer.token_bytes(beyond) == b""


def test_agrees_with_transformers_where_there_are_no_digits(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its loader's own
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    rng = random.Random(0)
    words = [
        "the",
        "quick",
        "doesn't",
        "jump;",
        "<|im_end|>",
        "ΑΒΓ",
        "(naïve)",
        "🥹",
        "{x}",
        "\n\t",
        "",
        "龜",
    ]
    for _ in range(200):
        text = " ".join(rng.choices(words, k=rng.randint(1, 12)))
        assert smollm2_tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


_DIGITS = r"\p{N}"
_GPT2_PATTERN = GPT2_WORDS.pattern
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
#: Written out once more from the models' own files, where a published tokenizer does not check them.
WORD_PATTERNS = {
    "gpt-2": [_GPT2_PATTERN],
    "starcoder": [_DIGITS, _GPT2_PATTERN],
    "falcon": [r"[\p{P}$+<=>^~|`]+", _GPT2_PATTERN, "[0-9]{3}"],
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9]{3}"],
    "qwen35": [
        rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    ],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", _DIGITS],
}


@pytest.mark.parametrize("name", WORD_PATTERNS)
@given(text=texts | prose | st.text(st.sampled_from("aBc 12345$`+=<!\n\r'sT中é\u0301"), max_size=30))
@settings(max_examples=150)
def test_words_are_cut_by_the_patterns_in_turn(name: str, text: str) -> None:
    pieces = [text]
    for pattern in WORD_PATTERNS[name]:
        split = regex.compile(f"({pattern})")
        # Two matches side by side, or one at an end, leave nothing between them.
        pieces = [part for piece in pieces for part in _isolated(split, piece) if part]
    alphabet = byte_alphabet()
    words = ["".join(alphabet[byte] for byte in piece.encode()) for piece in pieces]
    assert [word for word, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)] == words


def _isolated(pattern: regex.Pattern[str], text: str) -> list[str]:
    parts, at = [], 0
    for match in pattern.finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [*parts, text[at:]]


def test_every_name_cuts_text_without_losing_any() -> None:
    alphabet = byte_alphabet()
    for rules in PRE_TOKENIZERS.values():
        for text in SENTENCES:
            words = rules.build().pre_tokenize_str(text)
            assert "".join(word for word, _ in words) == "".join(alphabet[b] for b in text.encode())


def test_the_pre_tokenizer_can_be_set_against_the_files(smollm2_gguf: GGUFFile) -> None:
    metadata = {key: value for key, value in smollm2_gguf.metadata.items() if key != "tokenizer.ggml.pre"}
    with pytest.raises(
        UnsupportedModelError, match=r"rules of None .* with --pre-tokenizer; known are .*smollm"
    ):
        Tokenizer.from_gguf(metadata)
    tokenizer = Tokenizer.from_gguf(metadata, pre_tokenizer="smollm")
    assert tokenizer.encode("in 2026") == Tokenizer.from_gguf(smollm2_gguf.metadata).encode("in 2026")
    with pytest.raises(
        ConfigError, match=r"--pre-tokenizer is 'nobody', which is not known; known are .*llama"
    ):
        Tokenizer.from_gguf(smollm2_gguf.metadata, pre_tokenizer="nobody")
    with pytest.raises(ConfigError, match=r"--pre-tokenizer is 'smollm', but .* of kind 'llama'"):
        Tokenizer.from_gguf(small(model="llama"), pre_tokenizer="smollm")


def test_a_word_that_is_a_token_needs_no_merges_where_the_rules_say_so() -> None:
    tokens = {"tokens": ["a", "b", "ab", "<s>"], "token_type": [1, 1, 1, 3], "merges": [], "bos_token_id": 3}
    assert Tokenizer.from_gguf(small(**tokens, pre="gpt-2", eos_token_id=None)).encode("ab") == [0, 1]
    # llama.cpp's own rule: such files want BOS unless they say otherwise.
    assert Tokenizer.from_gguf(small(**tokens, pre="llama-bpe", eos_token_id=None)).encode("ab") == [3, 2]


def test_named_templates_of_a_file() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", **small()}
    assert Tokenizer.from_gguf(metadata).chat_templates == {"default": "a", "tool_use": "b"}
    with pytest.raises(CheckpointError, match="chat template 'default' is a int"):
        Tokenizer.from_gguf({**metadata, "tokenizer.chat_template": 3})


def small(**changes: Any) -> dict[str, Any]:
    """Metadata of a tokenizer with the tokens a, b, ab, a control token and one of each other kind."""
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", "<|im_end|>", "Ġ", "é¤", "<pad9>", "<s>"],
        "token_type": [1, 1, 1, 3, 1, 4, 5, 3],
        "merges": ["a b"],
        "bos_token_id": 7,
        "eos_token_id": 7,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def test_kinds_of_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(small())
    assert tokenizer.encode("ab b<|im_end|>é¤") == [2, 4, 1, 3, 5]
    # A user-defined token is plain text, though its characters are in the byte alphabet too.
    assert tokenizer.token_bytes(5) == "é¤".encode()
    assert tokenizer.token_bytes(4) == b" "
    assert tokenizer.token_bytes(6) == b""  # unused: a name made up for padding
    assert tokenizer.special_ids == {3, 7}
    assert tokenizer.eos_ids == (7, 3)
    assert tokenizer.decode([2, 3, 5]) == "abé¤"


def test_a_control_token_alone_makes_a_listed_name_an_end() -> None:
    assert Tokenizer.from_gguf(small(token_type=[1] * 8)).eos_ids == (7,)
    assert Tokenizer.from_gguf(small(eos_token_id=None, eot_token_id=0, eom_token_id=1)).eos_ids == (0, 1, 3)


@pytest.mark.parametrize(
    ("ends", "eos_ids"),
    [
        (["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"], (7, 0, 1, 2)),  # Llama 3
        (["<|end|>", "<|endoftext|>", "</s>"], (7, 1, 0)),  # Phi 3; only listed names count
        (["<|end|>", "<|return|>", "<|call|>"], (7, 1, 2)),  # gpt-oss, where <|end|> ends a message
    ],
)
def test_ends_of_turns_add_to_what_the_file_names(ends: list[str], eos_ids: tuple[int, ...]) -> None:
    tokens = [*ends, "a", "b", "c", "d", "<eos>"]
    types = [3, 3, 3, 1, 1, 1, 1, 3]
    tokenizer = Tokenizer.from_gguf(small(tokens=tokens, token_type=types, merges=[]))
    assert tokenizer.eos_ids == eos_ids
    named = Tokenizer.from_gguf(small(tokens=tokens, token_type=types, merges=[], eot_token_id=0))
    assert named.eos_ids[:2] == (7, 0)


def test_bos_is_added_where_the_model_says_so() -> None:
    tokenizer = Tokenizer.from_gguf(small(add_bos_token=True))
    assert tokenizer.encode("ab") == [7, 2]
    assert tokenizer.encode("ab", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, "kind 'bert'"),
        ({"model": None}, "kind None"),
        ({"pre": "superbpe"}, "rules of 'superbpe'"),
        ({"pre": None}, "rules of None"),
        ({"pre": ["gpt-2"]}, "rules of"),
    ],
)
def test_other_tokenizers_are_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        Tokenizer.from_gguf(small(**changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tokens": None}, "tokens is not a list of str"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", 1]}, "tokens is not a list of str"),
        ({"merges": None}, "merges is not a list of str"),
        ({"merges": ["ab"]}, "merge 'ab' is not two tokens"),
        ({"merges": ["a b c"]}, "merge 'a b c' is not two tokens"),
        ({"merges": ["a x"]}, "merges do not fit its tokens"),
        ({"token_type": [1]}, "8 tokens but 1 token types"),
        ({"token_type": ["1"] * 8}, "token_type is not a list of int"),
        ({"bos_token_id": 8}, "bos_token_id is 8"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": True}, "eot_token_id is True"),
        ({"bos_token_id": None, "add_bos_token": True}, "no bos_token_id"),
        ({"model": "llama"}, "scores is not a list of float"),
        ({"model": "llama", "scores": [0.0]}, "8 tokens but 1 scores"),
        ({"model": "gemma4", "merges": ["a x"]}, "merges do not fit its tokens"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        Tokenizer.from_gguf(small(**changes))
