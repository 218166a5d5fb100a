"""Text to token ids and back, whatever file the tokenizer came from.

Rule: `token_bytes` is the truth. A token stands for a fixed string of bytes; decoding is the UTF-8
reading of their concatenation, so text never depends on how it was cut into steps. (The first token of a
text may stand for less, `first_token_bytes`: SentencePiece puts a space before a text and takes it away
again.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequestError
from octavo.input.gguf_tokenizer import parts_from_gguf
from octavo.input.hf_tokenizer import parts_from_directory
from octavo.input.vocabulary import LeadingSpace, TokenizerParts, max_token_characters


class Tokenizer:
    """A model's tokenizer. Nothing in it changes, so threads may share one.

    vocab_size: how many tokens there are; the model's logits may be padded beyond that.
    eos_ids: every token that ends an answer, the file's EOS first. special_ids: tokens that are
    never part of the text, such as `<|im_end|>`. adds_bos: whether prompts begin with bos_id.
    max_token_bytes: bytes of the longest token. chat_templates: name -> source; empty where the
    model has none.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.vocab_size = len(parts.token_bytes)
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.adds_bos = parts.adds_bos
        self.special_ids = parts.special_ids
        self.chat_templates = dict(parts.chat_templates)
        self._engine = parts.engine
        self._bytes = parts.token_bytes
        self._leading_space = parts.leading_space
        self.max_token_bytes = max(1, *map(len, self._bytes))
        self._max_token_characters = max_token_characters(self._engine, self.max_token_bytes)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, pre_tokenizer: str | None = None) -> Tokenizer:
        """Build the tokenizer that `GGUFFile.metadata` describes.

        pre_tokenizer: a name of `pre_tokenizers.PRE_TOKENIZERS` to use instead of the file's.
        Raises UnsupportedModelError for a kind we have no rules for, CheckpointError for
        contradictions, ConfigError for a pre_tokenizer that is not known or not for this kind.
        """
        return cls(parts_from_gguf(metadata, pre_tokenizer))

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Build the tokenizer of a Hugging Face model directory.

        Reads tokenizer.json, or else tokenizer.model, and the configs around it. Raises
        UnsupportedModelError for a kind we have no rules for, CheckpointError for damaged files.
        """
        return cls(parts_from_directory(Path(path)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, after BOS where the model wants one and add_special_tokens is set.

        Special tokens written out in the text become these tokens. Bytes that have no token at all
        (some control characters, for a small vocabulary) are left out, as the model's own tokenizer
        does. Raises InvalidRequestError for text that is not Unicode: lone surrogates.
        """
        try:
            ids = self._engine.encode(text, add_special_tokens=False).ids
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

    def min_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without encoding it."""
        return 0 if self._max_token_characters is None else len(text) // self._max_token_characters

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids. Bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = []
        token_bytes = self.first_token_bytes
        for token_id in ids:
            if token_id in skipped:
                continue
            pieces.append(token_bytes(token_id))
            if self.token_bytes(token_id):
                token_bytes = self.token_bytes
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for ids of the padding beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def first_token_bytes(self, token_id: int) -> bytes:
        """The bytes of the first token of a text, after which `token_bytes` holds."""
        data = self.token_bytes(token_id)
        match self._leading_space:
            case LeadingSpace.ONE:
                return data.removeprefix(b" ")
            case LeadingSpace.ALL_OF_FIRST_TOKEN:
                return data.replace(b" ", b"")
            case LeadingSpace.KEPT:
                return data

    def token_text(self, token_id: int) -> str:
        """The token as text, the way templates and logprobs show it."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")
