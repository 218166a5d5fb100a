"""Tiny random models, as GGUF files and as what `transformers` makes of the same weights.

`make_llama_gguf(directory)` writes a Llama of two layers that every part of Octavo can load: weights,
hyperparameters and a byte-level tokenizer with a chat template. The model it returns holds the weights
as the file does, dequantised where they are quantised, so it is an oracle for the file's logits.

    tiny = make_llama_gguf(tmp_path, quantization="Q4_1", num_key_value_heads=4)
    runner = ModelRunner(tiny.path)
    expected = tiny.logits([[1, 2, 3]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quantize

#: GPT-2's alphabet: a printable character for each byte, printable bytes first.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SHIFTED = [byte for byte in range(256) if byte not in _PRINTABLE]
_MERGES = ["h e", "t he", "Ġ the"]
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
#: Tokens of the tokenizer: bytes, merges, special ones. The least that `vocab_size` may be.
NUM_TOKENS = 256 + len(_MERGES) + len(_SPECIAL)
EOS_ID = NUM_TOKENS - 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A GGUF file and the `transformers` model with its weights, in float64."""

    path: Path
    model: Any

    def logits(self, ids: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """The oracle's logits [batch, seq, vocab]."""
        with torch.no_grad():
            values: npt.NDArray[np.float64] = self.model(torch.tensor(ids)).logits.numpy()
        return values


def make_llama_gguf(
    directory: Path, *, quantization: str = "F32", seed: int = 0, **config_overrides: Any
) -> TinyModel:
    """Write a random Llama. quantization: of the matrices, "F32", "Q8_0" or "Q4_1".

    config_overrides: fields of transformers' LlamaConfig. vocab_size is at least NUM_TOKENS; what is
    beyond has no text.
    """
    model = _random_llama(seed, config_overrides)
    config = model.config
    path = directory / f"tiny-llama-{quantization.lower()}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    _add_hyperparameters(writer, config)
    _add_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = gguf.GGMLQuantizationType[quantization]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            of = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            raw = quantize(values, of)
            parameter.copy_(torch.from_numpy(dequantize(raw, of).reshape(values.shape)))
            projection = name.split(".")[-2]
            if projection in heads:
                raw = interleave(raw, heads[projection])
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), raw, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, model.double())


def interleave(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k in the order of llama.cpp's converter: `LlamaModel.permute` in
    convert_hf_to_gguf.py."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _random_llama(seed: int, overrides: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds: only where it is needed

    fields: dict[str, Any] = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "attn_implementation": "eager",
    }
    config = LlamaConfig(**(fields | overrides))
    if config.vocab_size < NUM_TOKENS:
        raise ValueError(f"vocab_size is {config.vocab_size}, but the tokenizer has {NUM_TOKENS} tokens")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        # Wide enough that attention prefers some tokens and logits differ by whole units.
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
            else:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def _add_hyperparameters(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    alphabet = {byte: chr(byte) for byte in _PRINTABLE}
    alphabet |= {byte: chr(0x100 + index) for index, byte in enumerate(_SHIFTED)}
    padding = [f"[PAD{index}]" for index in range(vocab_size - NUM_TOKENS)]
    normal = [alphabet[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in _MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*normal, *_SPECIAL, *padding])
    writer.add_token_types([_NORMAL] * len(normal) + [_CONTROL] * len(_SPECIAL) + [_UNUSED] * len(padding))
    writer.add_token_merges(_MERGES)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
