"""A tokenizer as the files of a Hugging Face model directory.

Rule: what is written reads back, here and in other programs, as a tokenizer that gives the same ids for
the same text, and the same text for the same ids. GGUF leaves decoding and the adding of BOS to the
program; here both are written out.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, processors

from octavo.input.vocabulary import SPACE_MARK, LeadingSpace, TokenizerParts


def tokenizer_files(parts: TokenizerParts) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json of a tokenizer that was made from a GGUF file."""
    engine = RustTokenizer.from_str(parts.engine.to_str())
    if engine.decoder is None:
        engine.decoder = _sentencepiece_decoder(parts.leading_space)
    bos = None if parts.bos_id is None else engine.id_to_token(parts.bos_id)
    if parts.adds_bos and bos is not None:
        engine.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, parts.bos_id)]
        )
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": engine.id_to_token(parts.eos_ids[0]) if parts.eos_ids else None,
        "add_bos_token": parts.adds_bos,
        "clean_up_tokenization_spaces": False,
    }
    if parts.chat_templates:
        config["chat_template"] = _templates(parts)
    return {
        "tokenizer.json": engine.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _sentencepiece_decoder(leading: LeadingSpace) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if leading is LeadingSpace.ONE:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _templates(parts: TokenizerParts) -> object:
    """A model's only template is text, several are a list."""
    if list(parts.chat_templates) == ["default"]:
        return parts.chat_templates["default"]
    return [{"name": name, "template": text} for name, text in parts.chat_templates.items()]
