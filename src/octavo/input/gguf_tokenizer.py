"""The tokenizer that a GGUF file's metadata describes.

Rule: what the file says is checked against itself, and what it asks for is served exactly or refused by
name. Three kinds are served: "gpt2" (byte-level BPE, words cut by the rules that tokenizer.ggml.pre
names), "llama" (SentencePiece BPE with scores) and "gemma4" (SentencePiece's alphabet with merges).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from octavo.errors import CheckpointError, ConfigError, UnsupportedModelError
from octavo.input.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from octavo.input.sentencepiece import SentencePieceModel
from octavo.input.vocabulary import (
    CONTROL,
    NORMAL,
    SPACE_MARK,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    LeadingSpace,
    TokenizerParts,
    byte_level_bytes,
    sentencepiece_bytes,
)

T = TypeVar("T")

#: Tokens that end a turn in the chat formats around. Many files name only one of them as EOS though
#: the model was trained on two; they count only where the file marks them as control tokens.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|return|>",
    "<|call|>",
    "<|end|>",
    "<end_of_turn>",
)
#: In the harmony format, which has it, <|end|> ends a message, and an answer has several.
_HARMONY_END_OF_TURN = "<|return|>"
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE_KEY = "tokenizer.chat_template"
_KINDS = ("gpt2", "llama", "gemma4")


def parts_from_gguf(metadata: Mapping[str, Any], pre_tokenizer: str | None = None) -> TokenizerParts:
    """See Tokenizer.from_gguf."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"the model's tokenizer is of kind {repr(kind)[:80]} (tokenizer.ggml.model); served are "
            f"{', '.join(map(repr, _KINDS))}"
        )
    if kind != "gpt2" and pre_tokenizer is not None:
        raise ConfigError(
            f"--pre-tokenizer is {pre_tokenizer[:80]!r}, but the model's tokenizer is of kind {kind!r}, "
            "which cuts no words; leave it out"
        )
    rules = _rules(metadata, pre_tokenizer) if kind == "gpt2" else None
    tokens = _list_of(str, metadata, "tokenizer.ggml.tokens")
    if not tokens:
        _fail("tokenizer.ggml.tokens is empty")
    types: list[int] = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list_of(int, metadata, "tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            _fail(f"there are {len(tokens)} tokens but {len(types)} token types")
    bos_id = _token_id(metadata, "bos_token_id", len(tokens))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is None:  # what llama.cpp, where most files are made for, takes it for
        adds_bos = bos_id is not None and (rules.adds_bos if rules is not None else True)
    if adds_bos and bos_id is None:
        _fail("add_bos_token is set, but there is no bos_token_id")
    leading_space = LeadingSpace.KEPT
    if rules is not None:
        engine = _byte_level_bpe(tokens, types, _merges(metadata), rules)
    elif kind == "llama":
        adds_space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        if adds_space_prefix:
            leading_space = LeadingSpace.ONE
        engine = _sentencepiece(metadata, tokens, types, adds_space_prefix)
    else:
        engine = _marked_bpe(tokens, types, _merges(metadata))
    to_bytes = _byte_level_token if kind == "gpt2" else _sentencepiece_token
    return TokenizerParts(
        engine=engine,
        token_bytes=[to_bytes(token, kind) for token, kind in zip(tokens, types, strict=True)],
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL)),
        bos_id=bos_id,
        eos_ids=_eos_ids(metadata, tokens, types),
        adds_bos=bool(adds_bos),
        leading_space=leading_space,
        chat_templates=_chat_templates(metadata),
    )


def _byte_level_token(token: str, kind: int) -> bytes:
    if kind == UNUSED:
        return b""  # a name made up to pad the vocabulary
    if kind in (CONTROL, USER_DEFINED):
        return token.encode()  # written as plain text, not in the byte alphabet
    return byte_level_bytes(token)


def _sentencepiece_token(token: str, kind: int) -> bytes:
    if kind == UNUSED:
        return b""
    return token.encode() if kind == CONTROL else sentencepiece_bytes(token)


def _byte_level_bpe(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]], rules: PreTokenizer
) -> RustTokenizer:
    engine = _build(lambda: BPE(vocab=_vocab(tokens), merges=list(merges), ignore_merges=rules.ignore_merges))
    if rules.nfc:
        engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = rules.build()
    engine.decoder = decoders.ByteLevel()
    _add_tokens(engine, tokens, types)
    return engine


def _marked_bpe(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, str]]
) -> RustTokenizer:
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    engine = _build(
        lambda: BPE(
            vocab=_vocab(tokens), merges=list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    engine.normalizer = normalizers.Replace(" ", SPACE_MARK)
    _add_tokens(engine, tokens, types)
    return engine


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], adds_space_prefix: bool
) -> RustTokenizer:
    scores = _list_of(float, metadata, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        _fail(f"there are {len(tokens)} tokens but {len(scores)} scores")
    return SentencePieceModel(tokens, scores, types, adds_space_prefix=adds_space_prefix).build()


def _build(make: Callable[[], BPE]) -> RustTokenizer:
    try:
        return RustTokenizer(make())
    except Exception as error:  # the library raises plain Exception
        _fail(f"its merges do not fit its tokens ({error})")


def _vocab(tokens: Sequence[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    return vocab


def _add_tokens(engine: RustTokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    for add, kinds in ((engine.add_special_tokens, (CONTROL, UNKNOWN)), (engine.add_tokens, (USER_DEFINED,))):
        add(
            [
                AddedToken(token, special=CONTROL in kinds, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in kinds
            ]
        )


def _rules(metadata: Mapping[str, Any], override: str | None) -> PreTokenizer:
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if override is not None:
        if override not in PRE_TOKENIZERS:
            raise ConfigError(f"--pre-tokenizer is {override[:80]!r}, which is not known; known are {known}")
        return PRE_TOKENIZERS[override]
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the model's text is cut into words by the rules of {repr(name)[:80]} (tokenizer.ggml.pre), "
            "which are not known here. Where they are those of another model, name these with "
            f"--pre-tokenizer; known are {known}. A file without that entry is too old to tell: better "
            "convert the model again"
        )
    return PRE_TOKENIZERS[name]


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    for merge in _list_of(str, metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not right or " " in right:
            _fail(f"merge {merge[:80]!r} is not two tokens with a space between them")
        pairs.append((left, right))
    return pairs


def _eos_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, key, len(tokens)) for key in _EOS_KEYS]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == CONTROL
    }
    if _HARMONY_END_OF_TURN in control:
        control.pop("<|end|>", None)
    listed = [control.get(token) for token in END_OF_TURN_TOKENS]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *listed) if token_id is not None))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata.get(_TEMPLATE_KEY)}
    for key, value in metadata.items():
        if key.startswith(f"{_TEMPLATE_KEY}."):
            templates[key.removeprefix(f"{_TEMPLATE_KEY}.")] = value
    for name, source in templates.items():
        if source is not None and not isinstance(source, str):
            _fail(f"the chat template {name[:80]!r} is a {type(source).__name__}")
    return {name: source for name, source in templates.items() if source is not None}


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        _fail(f"{key} is {repr(value)[:80]}, but its tokens are 0..{vocab_size - 1}")
    return value


def _list_of(kind: type[T], metadata: Mapping[str, Any], key: str) -> list[T]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        _fail(f"{key} is not a list of {kind.__name__}")
    return values


def _fail(problem: str) -> NoReturn:
    raise CheckpointError(f"the file's tokenizer is damaged: {problem}; convert the model again")
