"""The text side of an engine: a checkpoint's tokenizer and chat template.

Rule: no torch. It is made where requests arrive, which need not be where the model runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from octavo.config.schema import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.input.chat_template import ChatTemplate, read_template
from octavo.input.input_processor import InputProcessor
from octavo.input.tokenizer import Tokenizer
from octavo.weights.checkpoint import Checkpoint, naming, open_checkpoint


@dataclass(frozen=True, slots=True)
class Text:
    """What turns text into ids. path: of the checkpoint, for errors."""

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def of(cls, config: EngineConfig, checkpoint: Checkpoint) -> Self:
        """Read a checkpoint's. Raises what `Tokenizer` and `ChatTemplate` raise."""
        with naming(checkpoint.path):
            tokenizer = _tokenizer(config, checkpoint)
            return cls(checkpoint.path, tokenizer, _chat_template(config, tokenizer))

    @classmethod
    def read(cls, config: EngineConfig, path: Path) -> Self:
        """Open a model for its text alone."""
        checkpoint = open_checkpoint(path)
        try:
            return cls.of(config, checkpoint)
        finally:
            checkpoint.close()

    def inputs(self, *, max_model_len: int, vocab_size: int) -> InputProcessor:
        """What turns requests into the engine's, for a model of these sizes. CheckpointError if its
        vocabulary is too small."""
        if self.tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"{self.path}: the tokenizer has {self.tokenizer.vocab_size} tokens, but the model has "
                f"embeddings for {vocab_size}; convert the model again"
            )
        return InputProcessor(
            self.tokenizer, self.template, max_model_len=max_model_len, vocab_size=vocab_size
        )


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    """Of the files beside a directory's weights, or of what a GGUF file says of itself."""
    if not checkpoint.path.is_dir():
        return Tokenizer.from_gguf(checkpoint.metadata, pre_tokenizer=config.pre_tokenizer or None)
    if config.pre_tokenizer:
        raise ConfigError(
            f"--pre-tokenizer is {config.pre_tokenizer!r}, but {checkpoint.path} is a directory, whose own "
            "tokenizer files say how text is cut; leave it out"
        )
    return Tokenizer.from_directory(checkpoint.path)


def _chat_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The config's template, or the model's own; None where there is neither."""
    sources = read_template(config.chat_template) if config.chat_template else tokenizer.chat_templates
    if not sources:
        return None
    bos = "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id)
    eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
    return ChatTemplate(sources, bos_token=bos, eos_token=eos)
