"""Writes a `transformers` model as GGUF, as llama.cpp's converter does (its conversion/*.py; names are
those of the gguf package).

What that does to a model: q and k of the Llama family are interleaved, Gemma's norms get their 1, experts
are stacked, Llama 3's stretched frequencies become a tensor of factors, and hyperparameters keys of GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quantize

Floats = npt.NDArray[np.float32]
#: A tensor's bytes in a GGUF type, from its Hugging Face name and its values.
Encode = Callable[[str, Floats], tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", "granite")


def encode_as(kind_of: str | Callable[[str], str]) -> Encode:
    """Matrices in a GGUF type, or in what gives it for a name; vectors and routers as F32."""

    def encode(name: str, values: Floats) -> tuple[npt.NDArray[Any], gguf.GGMLQuantizationType]:
        of = "F32"
        if values.ndim > 1 and not name.endswith(("mlp.gate.weight", "mlp.router.weight", ".bias")):
            of = kind_of if isinstance(kind_of, str) else kind_of(name)
        kind = gguf.GGMLQuantizationType[of]
        return quantize(values, kind), kind

    return encode


def write_gguf(
    path: Path,
    model: Any,
    *,
    encode: Encode | None = None,
    extend: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write the model, and give it the weights that the file holds. extend: adds further metadata."""
    config, encode = model.config, encode or encode_as("F32")
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_sizes(writer, config)
    _add_windows(writer, config)
    _add_rope(writer, config)
    _add_extras(writer, config)
    if extend is not None:
        extend(writer)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    with torch.no_grad():
        for name, part in _parts(model):
            baked = 1.0 if config.model_type.startswith("gemma") and name.endswith("norm.weight") else 0.0
            raw, kind = encode(name, part.numpy() + np.float32(baked))
            part.copy_(torch.from_numpy(dequantize(raw, kind).reshape(part.shape) - np.float32(baked)))
            stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            writer.add_tensor(stored, _rows_as_stored(name, raw, config), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of q or k in the converter's order: `LlamaModel.permute` there."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _parts(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and views of the parameters; of experts, those that the files of before version 5 had."""
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        kind = "bias" if last.endswith("_bias") else "weight"
        if last in ("gate_up_proj", "gate_up_proj_bias"):
            for part, half in zip(("gate_proj", "up_proj"), _halves(model, parameter), strict=True):
                yield f"{stem}.{part}.{kind}", half
        elif last in ("down_proj", "down_proj_bias"):
            transposed = model.config.model_type == "gpt_oss" and kind == "weight"
            yield f"{stem}.down_proj.{kind}", parameter.mT if transposed else parameter
        else:
            yield f"{name}.weight" if last == "sinks" else name, parameter


def _halves(model: Any, parameter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gate and up of all experts; gpt-oss has them transposed, and in turns."""
    if model.config.model_type == "gpt_oss":
        rows = parameter.mT if parameter.ndim == 3 else parameter
        return rows[:, ::2], rows[:, 1::2]
    return parameter.chunk(2, dim=1)


def _rows_as_stored(name: str, raw: npt.NDArray[Any], config: Any) -> npt.NDArray[Any]:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    projection = name.split(".")[-2]
    if config.model_type not in INTERLEAVED or projection not in heads:
        return raw
    return interleave(raw, heads[projection])


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope_of(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _add_windows(writer: gguf.GGUFWriter, config: Any) -> None:
    """Mistral's window is lost on the way; it is written here, so that it can be read."""
    kind, window = config.model_type, getattr(config, "sliding_window", None)
    if window and kind in ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(window)
    elif kind == "phi3":
        writer.add_sliding_window(0)


def _add_rope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = _rope_of(config)
    kind, dim = rope["rope_type"], int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    if not config.model_type.startswith("gemma"):
        writer.add_rope_dimension_count(dim)
    if config.model_type != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, dim))
    elif kind == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(factor)
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.float32(rope[f"{which}_factor"]))


def _llama3_factors(rope: dict[str, Any], dim: int) -> Floats:
    """By what each pair's frequency is divided."""
    freqs = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    waves_in_context = rope["original_max_position_embeddings"] * freqs / (2 * np.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    kept = np.clip((waves_in_context - low) / (high - low), 0, 1)
    return np.float32(1 / ((1 - kept) / factor + kept))


def _add_extras(writer: gguf.GGUFWriter, config: Any) -> None:
    """What only some families have."""
    if experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if width := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(width)
    if config.model_type == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if cap := getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(cap)
    if cap := getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(cap)
