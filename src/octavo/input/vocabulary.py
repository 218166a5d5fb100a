"""What a tokenizer is made of, however its file says so, and which bytes each token stands for.

Rule: a token stands for a fixed string of bytes, so that decoding is one concatenation. The single
exception is the space that SentencePiece puts before a text and takes away again: what the first token
of a text loses is said by `LeadingSpace`.

Two ways of writing bytes as text are known. A byte-level BPE writes in an alphabet of 256 printable
characters, one for each byte (GPT-2's): printable bytes stand for themselves, the others are shifted
past U+0100. SentencePiece writes text as it is, but a space as U+2581 and a byte that is in no piece as
`<0xNN>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, Unigram

#: Kinds of tokens; the numbers are SentencePiece's, and those of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: How SentencePiece writes a space.
SPACE_MARK = "\u2581"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(Enum):
    """What the first token of a text loses when it is decoded."""

    KEPT = "nothing"
    ONE = "one space"
    ALL_OF_FIRST_TOKEN = "every space of the token, as the Metaspace decoder has it"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What `Tokenizer` is built from.

    engine: encodes. token_bytes: of each token, by id. chat_templates: name -> source; a model's only
    one is "default".
    """

    engine: RustTokenizer
    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    leading_space: LeadingSpace = LeadingSpace.KEPT
    chat_templates: Mapping[str, str] = field(default_factory=dict)


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHARACTER = _byte_of_character()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token written in GPT-2's alphabet; plain text where it is not."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a SentencePiece token, byte tokens included."""
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()


def turn_off_sampling(engine: RustTokenizer) -> None:
    """Turn off what a tokenizer does at random, which is for training: the same text, the same ids."""
    if isinstance(engine.model, BPE):
        engine.model.dropout = None
    elif isinstance(engine.model, Unigram):
        engine.model.alpha = engine.model.nbest_size = None


def max_token_characters(engine: RustTokenizer, max_token_bytes: int) -> int | None:
    """How many characters of a text one token may stand for; None where there is no limit.

    There is none where a token takes the white space beside it along, where unknown characters in a row
    become one token, and where text is normalised by rules that may shorten it at will.
    """
    model = engine.model
    fuses_unknown = isinstance(model, Unigram) or (
        isinstance(model, BPE) and model.fuse_unk and not model.byte_fallback
    )
    strips = any(token.lstrip or token.rstrip for token in engine.get_added_tokens_decoder().values())
    if fuses_unknown or strips:
        return None
    factor = 1
    for step in steps_of(engine.normalizer):
        match step:
            case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case {"type": "NFC"}:
                factor = 2  # four characters may become one, of at least two bytes
            case _:
                return None
    return max_token_bytes * factor


def steps_of(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder, sequences unfolded; none where there is no component."""
    return [] if component is None else _unfolded(json.loads(component.__getstate__()))


def _unfolded(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    if step.get("type") != "Sequence":
        return [dict(step)]
    inner = step.get("decoders") or step.get("normalizers") or []
    return [leaf for child in inner for leaf in _unfolded(child)]
