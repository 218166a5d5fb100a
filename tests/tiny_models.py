"""Tiny random models, as GGUF files and as what `transformers` makes of the same weights.

`make_llama_gguf(directory)` writes a Llama of two layers that every part of Octavo can load: weights,
hyperparameters and a byte-level tokenizer with a chat template. The model it returns holds the weights
as the file does, dequantised where they are quantised, so it is an oracle for the file's logits.

    tiny = make_llama_gguf(tmp_path, quantization="Q4_1", num_key_value_heads=4)
    runner = ModelRunner(tiny.path)
    expected = tiny.logits([[1, 2, 3]])
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from gguf_converter import encode_as, write_gguf

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
    directory: Path,
    *,
    quantization: str | Callable[[str], str] = "F32",
    seed: int = 0,
    **config_overrides: Any,
) -> TinyModel:
    """Write a random Llama. quantization: the GGUF type of the matrices, or what gives it for a tensor by
    its Hugging Face name. Types that the gguf package can't write get random blocks.

    config_overrides: fields of transformers' LlamaConfig. vocab_size is at least NUM_TOKENS; what is
    beyond has no text.
    """
    model = _random_llama(seed, config_overrides)
    plain = encode_as(quantization)
    index = itertools.count()

    def encode(name: str, values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], Any]:
        number = next(index)
        try:
            return plain(name, values)
        except NotImplementedError:
            of = quantization(name) if callable(quantization) else quantization
            raw = random_blocks(of, *values.shape, std=float(values.std()), seed=number)
            return raw, gguf.GGMLQuantizationType[of]

    path = directory / f"tiny-llama-{'mixed' if callable(quantization) else quantization.lower()}.gguf"
    vocab_size = model.config.vocab_size
    write_gguf(path, model, encode=encode, extend=lambda writer: add_tokenizer(writer, vocab_size))
    return TinyModel(path, model.double())


#: Bytes of each type's block that are f16 scales: anything else may be any byte.
_F16_FIELDS = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
    "MXFP4": [],
}


def random_blocks(
    type_name: str, rows: int, width: int, *, std: float = 0.1, seed: int = 0
) -> npt.NDArray[np.uint8]:
    """Rows of random, valid blocks of a GGUF type, uint8 [rows, nbytes of a row], for types that the gguf
    package can't quantise to as well. Their values have about the standard deviation `std`."""
    rng = np.random.default_rng(seed)
    if type_name in ("F32", "F16", "BF16"):
        kind = gguf.GGMLQuantizationType[type_name]
        raw = quantize(rng.normal(0, std, (rows, width)).astype(np.float32), kind)
        return np.ascontiguousarray(raw).view(np.uint8).reshape(rows, -1)
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (rows, width // block, nbytes), dtype=np.uint8)

    def fill(scale: float) -> None:
        drawn = rng.uniform(0.8, 1.2, blocks.shape[:2])
        for index, at in enumerate(_F16_FIELDS[type_name]):
            sign, factor = 1.0, 1.0
            if index:  # mins: GGUF adds Q4_1's and subtracts a K-quant's
                sign, factor = (-1.0, 7.0) if type_name in ("Q4_1", "Q5_1") else (1.0, 4.0)
            field = (drawn * scale * sign * factor).astype(np.float16)
            blocks[:, :, at : at + 2] = field[:, :, None].view(np.uint8)
        if type_name == "MXFP4":  # a power of two, biased by 127
            blocks[:, :, 0] = rng.integers(122, 125, blocks.shape[:2])
        if type_name == "IQ1_M":  # its f16 is spread over the high nibbles of its last 8 bytes
            bits = (drawn * scale).astype(np.float16).view(np.uint16).astype(np.uint16)
            for index in range(4):
                high = blocks[:, :, 48 + 2 * index + 1]
                nibble = (bits >> (4 * index) & 15).astype(np.uint8)
                blocks[:, :, 48 + 2 * index + 1] = (high & 15) | nibble << 4

    fill(1.0)
    if type_name != "MXFP4":
        values = dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[type_name])
        fill(std / float(values.std()))
    return blocks.reshape(rows, -1)


def make_llama_directory(
    directory: Path, *, dtype: str = "float32", max_shard_size: str = "1GB", seed: int = 0, **overrides: Any
) -> TinyModel:
    """Write a random Llama as transformers' save_pretrained does: config.json and safetensors."""
    model = _random_llama(seed, overrides)
    stored = copy.deepcopy(model).to(getattr(torch, dtype))
    stored.save_pretrained(directory, max_shard_size=max_shard_size)
    with torch.no_grad():  # not the buffers: rotary frequencies in bf16 are off by whole turns
        for ours, theirs in zip(model.parameters(), stored.parameters(), strict=True):
            ours.copy_(theirs)
    return TinyModel(directory, model.double())


def write_tokenizer(directory: Path, **config: Any) -> None:
    """The GGUF files' tokenizer, as tokenizer.json and tokenizer_config.json. config: of the latter."""
    vocab = {token: token_id for token_id, token in enumerate(_normal_tokens())}
    engine = RustTokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in _MERGES]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(list(_SPECIAL))
    engine.save(str(directory / "tokenizer.json"))
    fields = {"eos_token": _SPECIAL[-1], "chat_template": CHAT_TEMPLATE, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))


def _normal_tokens() -> list[str]:
    alphabet = {byte: chr(byte) for byte in _PRINTABLE}
    alphabet |= {byte: chr(0x100 + index) for index, byte in enumerate(_SHIFTED)}
    return [alphabet[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in _MERGES]


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


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The metadata of the tokenizer, and of a chat template."""
    padding = [f"[PAD{index}]" for index in range(vocab_size - NUM_TOKENS)]
    normal = _normal_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*normal, *_SPECIAL, *padding])
    writer.add_token_types([_NORMAL] * len(normal) + [_CONTROL] * len(_SPECIAL) + [_UNUSED] * len(padding))
    writer.add_token_merges(_MERGES)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
