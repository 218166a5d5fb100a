"""Tiny random models of every family, as transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 131
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)],
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": LAYERS}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama linear rope": (
        "llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}
    ),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 part of a head": (
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75
            },
        },
    ),
    "phi3 longrope": (
        "phi3",
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3, every fourth layer": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen3 moe": (
        "qwen3_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [1],
        },
    ),
    "qwen3 moe, shares as they are": (
        "qwen3_moe",
        {
            "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
            "norm_topk_prob": False,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8,
            "layer_types": LAYERS, "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3_text", GEMMA),
}  # fmt: skip


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    kind, differences = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SMALL, **differences, **changes})
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}  # they take float64
    model = AutoModelForCausalLM.from_config(config, **eager).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.1)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() >= 2:
                parameter.mul_(3)  # logits that spread, attention that looks somewhere
    return model
