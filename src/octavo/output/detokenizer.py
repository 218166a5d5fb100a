"""Turns a stream of token ids into a stream of text.

Rule: no half characters, and no dependence on how the ids were cut into steps. A token is a string
of bytes, so the stream is read by an incremental UTF-8 decoder: what it holds back is the unfinished
tail of one character, at most 3 bytes, and each token costs its own length, not that of the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """What this room needs of a tokenizer; `input.tokenizer.Tokenizer` is one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no part of the text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id that is no token."""

    def first_token_bytes(self, token_id: int) -> bytes:
        """The same for the first token of a text that has any."""


class Detokenizer:
    """The text of one request. After `finish` it takes no more tokens."""

    def __init__(self, tokenizer: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._first_token_bytes = tokenizer.first_token_bytes
        self._at_start = True
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _new_utf8_decoder(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the characters they complete."""
        shown = [token_id for token_id in ids if token_id not in self._skipped]
        pieces = [self._token_bytes(token_id) for token_id in shown]
        if self._at_start:
            first = next((index for index, piece in enumerate(pieces) if piece), None)
            if first is not None:
                pieces[first] = self._first_token_bytes(shown[first])
                self._at_start = False
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        """Return what was held back, as U+FFFD: no token will complete it any more."""
        return self._decoder.decode(b"", final=True)
