"""Text to token ids and back, built from what a GGUF file says of its tokenizer.

Rule: `token_bytes` is the truth. A token stands for a fixed string of bytes; decoding is the UTF-8
reading of their concatenation, so text never depends on how it was cut into steps.

The vocabulary of a byte-level BPE is written in an alphabet of 256 printable characters, one for
each byte (GPT-2's): printable bytes stand for themselves, the others are shifted past U+0100.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from octavo.errors import CheckpointError, InvalidRequestError, UnsupportedModelError

T = TypeVar("T")

#: tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

#: Tokens that end a turn in the chat formats around. Many files name only one of them as EOS though
#: the model was trained on two; they count only where the file marks them as control tokens.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Each digit is a token of its own, and never takes the space before it along.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


#: tokenizer.ggml.pre -> how text is cut into words before merging.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
}


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """A byte-level BPE tokenizer. Nothing in it changes, so threads may share one.

    vocab_size: how many tokens there are; the model's logits may be padded beyond that.
    eos_ids: every token that ends an answer, the file's EOS first. special_ids: tokens that are
    never part of the text, such as `<|im_end|>`. adds_bos: whether prompts begin with bos_id.
    max_token_bytes: bytes of the longest token.
    """

    def __init__(
        self,
        bpe: RustTokenizer,
        tokens: Sequence[str],
        token_types: Sequence[int],
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        adds_bos: bool,
    ) -> None:
        self.vocab_size = len(tokens)
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.adds_bos = adds_bos
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, kind in enumerate(token_types) if kind in (_UNKNOWN, _CONTROL)
        )
        self._bpe = bpe
        self._bytes = [_bytes_of(token, kind) for token, kind in zip(tokens, token_types, strict=True)]
        self.max_token_bytes = max(map(len, self._bytes))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that `GGUFFile.metadata` describes.

        Raises UnsupportedModelError for a kind we have no rules for, CheckpointError for
        contradictions.
        """
        pre_tokenizer = _pre_tokenizer(metadata)
        tokens = _list_of(str, metadata, "tokenizer.ggml.tokens")
        if not tokens:
            _fail("tokenizer.ggml.tokens is empty")
        types: list[int] = [_NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in metadata:
            types = _list_of(int, metadata, "tokenizer.ggml.token_type")
            if len(types) != len(tokens):
                _fail(f"there are {len(tokens)} tokens but {len(types)} token types")
        merges = _list_of(str, metadata, "tokenizer.ggml.merges")
        bos_id = _token_id(metadata, "bos_token_id", len(tokens))
        adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", False))
        if adds_bos and bos_id is None:
            _fail("add_bos_token is set, but there is no bos_token_id")
        return cls(
            _build_bpe(tokens, types, merges, pre_tokenizer),
            tokens,
            types,
            bos_id=bos_id,
            eos_ids=_eos_ids(metadata, tokens, types),
            adds_bos=adds_bos,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, after BOS where the model wants one and add_special_tokens is set.

        Special tokens written out in the text become these tokens. Bytes that have no token at all
        (some control characters, for a small vocabulary) are left out, as the model's own tokenizer
        does. Raises InvalidRequestError for text that is not Unicode: lone surrogates.
        """
        try:
            ids = self._bpe.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            position = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if position is None:
                raise
            raise InvalidRequestError(
                f"the text has a lone surrogate (U+{ord(text[position]):04X}) at character {position}, which "
                "is no Unicode text; send whole characters"
            ) from error
        if add_special_tokens and self.adds_bos and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids. Bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for ids of the padding beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """The token as text, the way templates and logprobs show it."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _bytes_of(token: str, kind: int) -> bytes:
    if kind == _UNUSED:
        return b""  # a name made up to pad the vocabulary
    if kind in (_CONTROL, _USER_DEFINED):
        return token.encode()  # written as plain text, not in the byte alphabet
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _build_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
) -> RustTokenizer:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not right or " " in right:
            _fail(f"merge {merge!r} is not two tokens with a space between them")
        pairs.append((left, right))
    try:
        bpe = RustTokenizer(BPE(vocab=vocab, merges=pairs))
    except Exception as error:  # the library raises plain Exception
        _fail(f"its merges do not fit its tokens ({error})")
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    added = {_CONTROL: bpe.add_special_tokens, _USER_DEFINED: bpe.add_tokens}
    for kind, add in added.items():
        add(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == kind
            ]
        )
    return bpe


def _pre_tokenizer(metadata: Mapping[str, Any]) -> pre_tokenizers.PreTokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"the model's tokenizer is of kind {model!r} (tokenizer.ggml.model); only 'gpt2', byte-level "
            "BPE, is served so far"
        )
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the model cuts text into words by the rules of {name!r} (tokenizer.ggml.pre), which are not "
            f"served so far; served are {', '.join(sorted(PRE_TOKENIZERS))}. A file without that entry is "
            "too old to tell: convert the model again"
        )
    return PRE_TOKENIZERS[name]()


def _eos_ids(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    named = [_token_id(metadata, key, len(tokens)) for key in _EOS_KEYS]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL
    }
    listed = [control.get(token) for token in END_OF_TURN_TOKENS]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *listed) if token_id is not None))


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab_size:
        _fail(f"{key} is {value!r}, but its tokens are 0..{vocab_size - 1}")
    return value


def _list_of(kind: type[T], metadata: Mapping[str, Any], key: str) -> list[T]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        _fail(f"{key} is not a list of {kind.__name__}")
    return values


def _fail(problem: str) -> NoReturn:
    raise CheckpointError(f"the file's tokenizer is damaged: {problem}; convert the model again")
