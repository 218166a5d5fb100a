"""The Llama family: pre-norm blocks of grouped-query attention and a SiLU-gated MLP.

Touvron et al., "LLaMA" and "Llama 2"; SmolLM2 is of this family. Rule: a model file reads a config and
emits ops; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, Program, RopeTable, Shard
from octavo.program.rope import inverse_frequencies


def build(b: ProgramBuilder, config: Mapping[str, Any], max_model_len: int) -> Program:
    """The program of a Llama model, from its config under Hugging Face's keys."""
    _check(config)
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    embed = b.weight("model.embed_tokens.weight", (config["vocab_size"], hidden), shard=Shard.ROWS)
    rope = b.rope_table(inverse_frequencies(config["rotary_dim"], config["rope_theta"]), max_model_len)
    residual = b.embedding(embed)
    delta: Buf | None = None
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norm = b.weight(f"{name}.input_layernorm.weight", (hidden,))
        if delta is None:
            x = b.rms_norm(residual, norm, eps=eps)
        else:
            x, residual = b.add_rms_norm(delta, residual, norm, eps=eps)
        attended = _attention(b, config, name, x, rope)
        norm = b.weight(f"{name}.post_attention_layernorm.weight", (hidden,))
        x, residual = b.add_rms_norm(attended, residual, norm, eps=eps)
        delta = _mlp(b, config, name, x)
    assert delta is not None
    norm = b.weight("model.norm.weight", (hidden,))
    x, _ = b.add_rms_norm(delta, residual, norm, eps=eps)
    head = embed
    if not config["tie_word_embeddings"]:
        head = b.weight("lm_head.weight", (config["vocab_size"], hidden), shard=Shard.ROWS)
    return b.build(b.linear(b.gather_sampled(x), head))


def _attention(b: ProgramBuilder, config: Mapping[str, Any], name: str, x: Buf, rope: RopeTable) -> Buf:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    qkv = b.weight(
        f"{name}.self_attn.qkv",
        ((heads + 2 * kv_heads) * dim, hidden),
        parts=tuple(f"{name}.self_attn.{p}_proj.weight" for p in "qkv"),
        shard=Shard.ROWS,
    )
    output = b.weight(f"{name}.self_attn.o_proj.weight", (hidden, heads * dim), shard=Shard.COLUMNS)
    kv = b.kv(kv_heads, dim)
    q = b.rotary_store_kv(b.linear(x, qkv), kv, rope, q_heads=heads)
    return b.linear(b.attention(q, kv, q_heads=heads, scale=dim**-0.5), output)


def _mlp(b: ProgramBuilder, config: Mapping[str, Any], name: str, x: Buf) -> Buf:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    gate_up = b.weight(
        f"{name}.mlp.gate_up",
        (2 * width, hidden),
        parts=tuple(f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up")),
        shard=Shard.ROWS,
    )
    down = b.weight(f"{name}.mlp.down_proj.weight", (hidden, width), shard=Shard.COLUMNS)
    return b.linear(b.gated_activation(b.linear(x, gate_up), "silu"), down)


def _check(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(
            f"hidden_act {config['hidden_act']!r} is not served in this family; only silu is"
        )
    if config["rope_scaling"] not in (None, "none"):
        raise UnsupportedModelError(
            f"rope scaling {config['rope_scaling']!r} is not served yet; only models without it are"
        )
    if config["rotary_dim"] != config["head_dim"] or config["head_dim"] % 2:
        raise UnsupportedModelError(
            f"rotation of {config['rotary_dim']} elements of heads of {config['head_dim']} is not served; "
            "only that of whole, even heads is"
        )
