"""Gemma 2 and 3: norms before and after each block, GeGLU, windows between full layers.

Gemma Team, "Gemma 2" and "Gemma 3". Norms multiply with 1 + w, embeddings are scaled by sqrt(hidden).
Gemma 2 caps scores and logits softly; Gemma 3 norms q and k, and rotates windowed layers by a table of
their own.
"""

from __future__ import annotations

import numpy as np

from octavo.models.blocks import (
    Config,
    activation_of,
    attention,
    attention_spec,
    embedding_weight,
    gated_mlp,
    head,
    rope_table,
    window_of,
)
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, Program, RopeTable, Weight

ARCHITECTURES = ("gemma2", "gemma3_text")


def build(b: ProgramBuilder, config: Config, max_model_len: int) -> Program:
    """The program of a Gemma 2 or 3 text model, from its config under Hugging Face's keys."""
    eps = config["rms_norm_eps"]
    newer = config["model_type"] == "gemma3_text"
    full, local = _ropes(b, config, max_model_len, newer=newer)
    embed = embedding_weight(b, config)
    # The published weights were trained with the factor rounded to the checkpoint's dtype.
    residual = b.embedding(embed, scale=float(np.float32(config["hidden_size"] ** 0.5)))
    x = b.rms_norm(residual, _norm(b, config, "model.layers.0.input_layernorm"), eps=eps)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        window = window_of(config, layer) if _windowed(config, layer) else None
        spec = attention_spec(
            config,
            full if window is None else local,
            scale=float(config["query_pre_attn_scalar"]) ** -0.5,
            window=window,
            softcap=config.get("attn_logit_softcapping"),
            norm_q_k="head" if newer else None,
            norm_offset=_norm_offset(config),
            bias=bool(config.get("attention_bias")),
            output_bias=bool(config.get("attention_bias")),
        )
        out = attention(b, f"{name}.self_attn", x, spec)
        out = b.rms_norm(out, _norm(b, config, f"{name}.post_attention_layernorm"), eps=eps)
        norm = _norm(b, config, f"{name}.pre_feedforward_layernorm")
        x, residual = b.add_rms_norm(out, residual, norm, eps=eps)
        out = gated_mlp(b, f"{name}.mlp", x, config["intermediate_size"], activation=activation_of(config))
        out = b.rms_norm(out, _norm(b, config, f"{name}.post_feedforward_layernorm"), eps=eps)
        following = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm"
        x, residual = b.add_rms_norm(out, residual, _norm(b, config, following), eps=eps)
    return b.build(_logits(b, config, x, embed))


def _windowed(config: Config, layer: int) -> bool:
    """Whether a layer has a window, where a config of an older version does not list layer_types."""
    if config.get("layer_types") is not None:
        return True  # window_of knows
    if config["model_type"] == "gemma2":
        return layer % 2 == 0
    return (layer + 1) % int(config.get("sliding_window_pattern") or 6) != 0


def _ropes(
    b: ProgramBuilder, config: Config, max_model_len: int, *, newer: bool
) -> tuple[RopeTable, RopeTable]:
    """The tables of full and of windowed layers."""
    if not newer:
        table = rope_table(b, config, max_model_len)
        return table, table
    kinds = config["rope_parameters"]
    tables = [
        rope_table(b, {**config, "rope_parameters": kinds[kind]}, max_model_len)
        for kind in ("full_attention", "sliding_attention")
    ]
    return tables[0], tables[1]


def _logits(b: ProgramBuilder, config: Config, x: Buf, embed: Weight) -> Buf:
    logits = head(b, config, x, embed)
    cap = config.get("final_logit_softcapping")
    return logits if cap is None else b.scale_logits(logits, softcap=float(cap))


def _norm(b: ProgramBuilder, config: Config, name: str) -> Weight:
    return b.weight(f"{name}.weight", (config["hidden_size"],), offset=_norm_offset(config))


def _norm_offset(config: Config) -> float:
    """What norms add to their weights: 1, unless the checkpoint's hold it already."""
    return float(config.get("norm_offset", 1.0))
