"""Log-probabilities in OpenAI's two forms, and those of prompts.

Rule: no byte is lost. A token that is no text of its own is shown with its bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo.input.tokenizer import Tokenizer
from octavo.messages import TokenLogprobs
from octavo.output.detokenizer import Detokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """The `logprobs` of a choice of chat; None where there are none."""
    if not entries:
        return None

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = []
    for entry in entries:
        top = [token(token_id, logprob) for token_id, logprob in entry.top]
        content.append({**token(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], count: int
) -> list[dict[str, Any] | None]:
    """One object for each token of a prompt, by token id; None for the first, which nothing precedes."""

    def token(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    values: list[dict[str, Any] | None] = [None]
    for entry in entries:
        top = {str(i): token(i, logprob, rank) for rank, (i, logprob) in enumerate(entry.top[:count], 1)}
        own = {str(entry.token_id): token(entry.token_id, entry.logprob, entry.rank)}
        values.append(top | own)
    return values


class LegacyLogprobs:
    """The `logprobs` of a choice of completions, piece by piece. count: alternatives for each token.

    text_offset counts characters of the choice's text. A token that begins within a character has the
    offset of that character. Tokens that a stop string cut off have the offset they would have without it.
    """

    def __init__(
        self, tokenizer: Tokenizer, count: int, *, offset: int = 0, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._offset = offset
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)

    def echo(
        self, prompt_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, unseen: int
    ) -> dict[str, Any]:
        """Of a prompt, the first `unseen` tokens of which are no part of its text."""
        value = self._empty()
        for index, (token_id, entry) in enumerate(zip(prompt_ids, [None, *entries], strict=True)):
            self._append(value, token_id, entry, seen=index >= unseen)
        return value

    def piece(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens of the answer."""
        value = self._empty()
        for entry in entries:
            self._append(value, entry.token_id, entry, seen=True)
        return value

    def _empty(self) -> dict[str, Any]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def _append(
        self, value: dict[str, Any], token_id: int, entry: TokenLogprobs | None, *, seen: bool
    ) -> None:
        value["tokens"].append(self._token(token_id))
        value["text_offset"].append(self._advance(token_id) if seen else self._offset)
        if entry is None:
            value["token_logprobs"].append(None)
            value["top_logprobs"].append(None)
            return
        value["token_logprobs"].append(entry.logprob)
        top = {self._token(i): logprob for i, logprob in entry.top[: self._count]}
        value["top_logprobs"].append({self._token(token_id): entry.logprob} | top)

    def _advance(self, token_id: int) -> int:
        """Go behind a token, and say where it began."""
        delta = len(self._detokenizer.push([token_id]))
        begin, self._offset = self._offset, self._offset + delta
        raw = self._tokenizer.token_bytes(token_id)
        if raw and raw[0] & 0xC0 != 0x80:  # no part of a character under way, which ends here as U+FFFD
            begin += max(0, delta - len(_new_utf8_decoder(errors="replace").decode(raw)))
        return begin

    def _token(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
