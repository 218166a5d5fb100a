"""The Llama family: pre-norm blocks of grouped-query attention and a gated MLP.

Touvron et al., "LLaMA" and "Llama 2"; SmolLM2 is of this family. Close relatives differ in a field or
two: Mistral has a sliding window, Qwen2 biases on q, k and v, Qwen3 norms q and k, Phi-3 fuses tensors and
rotates part of a head, SmolLM3 rotates nothing in some layers, Granite multiplies what flows between blocks,
Mixtral and Qwen3-MoE have experts.
Rule: a model file reads a config and emits ops; it computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.models.blocks import (
    AttentionSpec,
    Config,
    activation_of,
    attention,
    attention_spec,
    embedding_weight,
    expert_mlp,
    gated_mlp,
    head,
    rope_table,
    window_of,
)
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, Program, RopeTable


@dataclass(frozen=True, slots=True)
class _Relative:
    """What one architecture does differently from Llama."""

    bias: bool = False
    norm_q_k: str | None = None
    windowed: bool = False
    fused: bool = False
    rotates_part: bool = False
    multiplies: bool = False
    rotates_some: bool = False
    experts: tuple[str, tuple[str, str, str]] | None = None  # where they are, and gate, up, down there


_RELATIVES = {
    "llama": _Relative(),
    "mistral": _Relative(windowed=True),
    "qwen2": _Relative(bias=True, windowed=True),
    "qwen3": _Relative(norm_q_k="head", windowed=True),
    "phi3": _Relative(fused=True, rotates_part=True, windowed=True),
    "smollm3": _Relative(windowed=True, rotates_some=True),
    "granite": _Relative(multiplies=True),
    "mixtral": _Relative(windowed=True, experts=("block_sparse_moe", ("w1", "w3", "w2"))),
    "qwen3_moe": _Relative(
        norm_q_k="head", windowed=True, experts=("mlp", ("gate_proj", "up_proj", "down_proj"))
    ),
}
ARCHITECTURES = tuple(_RELATIVES)


def build(b: ProgramBuilder, config: Config, max_model_len: int) -> Program:
    """The program of a Llama model or a relative, from its config under Hugging Face's keys."""
    relative = _RELATIVES[config["model_type"]]
    _check(config, relative)
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    x_scale = float(config["residual_multiplier"]) if relative.multiplies else None
    embed = embedding_weight(b, config)
    rope = rope_table(b, config, max_model_len)
    still = b.rope_table((), max_model_len, boundary=rope.boundary) if relative.rotates_some else rope
    scale = float(config["embedding_multiplier"]) if relative.multiplies else 1.0
    residual = b.embedding(embed, scale=scale)
    delta: Buf | None = None
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norm = b.weight(f"{name}.input_layernorm.weight", (hidden,))
        if delta is None:
            x = b.rms_norm(residual, norm, eps=eps)
        else:
            x, residual = b.add_rms_norm(delta, residual, norm, eps=eps, x_scale=x_scale)
        turning = rope if _rotates(config, layer) else still
        attended = attention(b, f"{name}.self_attn", x, _spec(config, relative, turning, layer))
        norm = b.weight(f"{name}.post_attention_layernorm.weight", (hidden,))
        x, residual = b.add_rms_norm(attended, residual, norm, eps=eps, x_scale=x_scale)
        delta = _feed_forward(b, config, relative, name, x, layer)
    assert delta is not None
    norm = b.weight("model.norm.weight", (hidden,))
    x, _ = b.add_rms_norm(delta, residual, norm, eps=eps, x_scale=x_scale)
    logits = head(b, config, x, embed)
    if relative.multiplies:
        logits = b.scale_logits(logits, scale=1.0 / float(config["logits_scaling"]))
    return b.build(logits)


def _feed_forward(
    b: ProgramBuilder, config: Config, relative: _Relative, name: str, x: Buf, layer: int
) -> Buf:
    dense = layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % config.get(
        "decoder_sparse_step", 1
    )
    if relative.experts is None or dense:
        width, activation = config["intermediate_size"], activation_of(config)
        return gated_mlp(b, f"{name}.mlp", x, width, activation=activation, fused=relative.fused)
    where, parts = relative.experts
    return expert_mlp(b, f"{name}.{where}.gate.weight", f"{name}.{where}.experts.{{e}}", parts, x, config)


def _spec(config: Config, relative: _Relative, rope: RopeTable, layer: int) -> AttentionSpec:
    differences: dict[str, Any] = {
        "bias": relative.bias or bool(config.get("attention_bias")),
        "output_bias": bool(config.get("attention_bias")) and not relative.bias,
        "norm_q_k": relative.norm_q_k,
        "fused": relative.fused,
    }
    if relative.windowed:
        differences["window"] = window_of(config, layer)
    if relative.multiplies:
        differences["scale"] = float(config["attention_multiplier"])
    return attention_spec(config, rope, **differences)


def _rotates(config: Config, layer: int) -> bool:
    """SmolLM3: every fourth layer rotates nothing, unless the config lists (1: rotates) which."""
    listed = config.get("no_rope_layers")
    if listed is None:
        return (layer + 1) % int(config.get("no_rope_layer_interval") or 4) != 0
    if not isinstance(listed, list) or len(listed) != config["num_hidden_layers"]:
        raise UnsupportedModelError(
            f"no_rope_layers is {str(listed)[:200]}; it must list {config['num_hidden_layers']} layers"
        )
    return bool(listed[layer])


def _check(config: Config, relative: _Relative) -> None:
    whole = config["rotary_dim"] == config["head_dim"]
    if config["head_dim"] % 2 or config["rotary_dim"] % 2 or not (whole or relative.rotates_part):
        raise UnsupportedModelError(
            f"rotation of {config['rotary_dim']} elements of heads of {config['head_dim']} is not served; "
            "only that of whole, even heads is"
        )
    if config.get("mlp_bias"):
        raise UnsupportedModelError("biases of the MLP (mlp_bias) are not served")
