"""OLMo 2: norms after each block instead of before, and norms over all heads of q and k.

OLMo Team, "2 OLMo 2 Furious".
"""

from __future__ import annotations

from octavo.models.blocks import (
    Config,
    activation_of,
    attention,
    attention_spec,
    embedding_weight,
    gated_mlp,
    head,
    rope_table,
)
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Program

ARCHITECTURES = ("olmo2",)


def build(b: ProgramBuilder, config: Config, max_model_len: int) -> Program:
    """The program of an OLMo 2 model, from its config under Hugging Face's keys."""
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    bias = bool(config.get("attention_bias"))
    spec = attention_spec(
        config, rope_table(b, config, max_model_len), norm_q_k="all", bias=bias, output_bias=bias
    )
    embed = embedding_weight(b, config)
    x = b.embedding(embed)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        out = attention(b, f"{name}.self_attn", x, spec)
        norm = b.weight(f"{name}.post_attention_layernorm.weight", (hidden,))
        x = b.add(b.rms_norm(out, norm, eps=eps), x)
        out = gated_mlp(b, f"{name}.mlp", x, config["intermediate_size"], activation=activation_of(config))
        norm = b.weight(f"{name}.post_feedforward_layernorm.weight", (hidden,))
        x = b.add(b.rms_norm(out, norm, eps=eps), x)
    x = b.rms_norm(x, b.weight("model.norm.weight", (hidden,)), eps=eps)
    return b.build(head(b, config, x, embed))
