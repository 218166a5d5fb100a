"""What families are made of: attention and gated MLPs, with the ways in which families differ.

Rule: a difference between families is a field of a spec, read here once; a family's file says which
fields it sets and in what order its layers norm and add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, RopeTable, Shard, Weight
from octavo.program.rope import rope_frequencies

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention. norm_q_k: no norm, "head" (each alone) or "all" (all heads together)."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeTable
    scale: float
    bias: bool = False
    output_bias: bool = False
    fused: bool = False  # the checkpoint keeps q, k and v in one tensor
    norm_q_k: str | None = None
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def attention_spec(config: Config, rope: RopeTable, **differences: Any) -> AttentionSpec:
    """The spec of plain grouped-query attention with a config's sizes, and a family's differences."""
    dim = config["head_dim"]
    fields: dict[str, Any] = {
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": dim,
        "rope": rope,
        "scale": dim**-0.5,
        "norm_eps": config["rms_norm_eps"],
    }
    return AttentionSpec(**{**fields, **differences})


def attention(b: ProgramBuilder, name: str, x: Buf, spec: AttentionSpec) -> Buf:
    """x [T, hidden] -> [T, hidden], with the weights under `name`."""
    hidden, heads, kv_heads, dim = x.width, spec.heads, spec.kv_heads, spec.head_dim
    width = (heads + 2 * kv_heads) * dim
    names = ["qkv_proj"] if spec.fused else ["q_proj", "k_proj", "v_proj"]
    weight = stacked(b, f"{name}.qkv.weight", (width, hidden), [f"{name}.{n}.weight" for n in names])
    bias = (
        stacked(b, f"{name}.qkv.bias", (width,), [f"{name}.{n}.bias" for n in names]) if spec.bias else None
    )
    qkv = b.linear(x, weight, bias=bias)
    if spec.norm_q_k:
        together = spec.norm_q_k == "all"
        sizes = [dim * (count if together else 1) for count in (heads, kv_heads)]
        q_norm, k_norm = (
            b.weight(f"{name}.{which}_norm.weight", (size,), offset=spec.norm_offset)
            for which, size in zip("qk", sizes, strict=True)
        )
        qkv = b.qk_norm(qkv, q_norm, k_norm, q_heads=heads, kv_heads=kv_heads, eps=spec.norm_eps)
    kv = b.kv(kv_heads, dim, window=spec.window)
    q = b.rotary_store_kv(qkv, kv, spec.rope, q_heads=heads)
    sinks = b.weight(f"{name}.sinks", (heads,)) if spec.sinks else None
    out = b.attention(q, kv, q_heads=heads, scale=spec.scale, softcap=spec.softcap, sinks=sinks)
    output = b.weight(f"{name}.o_proj.weight", (hidden, heads * dim), shard=Shard.COLUMNS)
    output_bias = b.weight(f"{name}.o_proj.bias", (hidden,)) if spec.output_bias else None
    return b.linear(out, output, bias=output_bias)


def gated_mlp(
    b: ProgramBuilder, name: str, x: Buf, width: int, *, activation: str = "silu", fused: bool = False
) -> Buf:
    """x [T, hidden] -> [T, hidden] through `width` gated channels."""
    hidden = x.width
    names = ["gate_up_proj"] if fused else ["gate_proj", "up_proj"]
    gate_up = stacked(b, f"{name}.gate_up", (2 * width, hidden), [f"{name}.{n}.weight" for n in names])
    down = b.weight(f"{name}.down_proj.weight", (hidden, width), shard=Shard.COLUMNS)
    activated = b.gated_activation(b.linear(x, gate_up, feed_forward=True), activation)
    return b.linear(activated, down, feed_forward=True)


def expert_mlp(
    b: ProgramBuilder, router: str, expert: str, parts: tuple[str, str, str], x: Buf, config: Config
) -> Buf:
    """x [T, hidden] -> [T, hidden] through a mixture of gated MLPs.

    router: its weight's name. expert: the name of expert {e}; parts: its gate, up and down tensors.
    """
    hidden, experts = x.width, int(config["num_local_experts"])
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    gate, up, down = parts
    names = [expert.format(e=e) for e in range(experts)]
    stem = router.removesuffix(".gate.weight")
    gate_up = stacked(
        b, f"{stem}.experts.gate_up", (2 * width * experts, hidden),
        [f"{name}.{part}.weight" for name in names for part in (gate, up)],
    )  # fmt: skip
    out = stacked(
        b, f"{stem}.experts.down", (hidden * experts, width), [f"{name}.{down}.weight" for name in names]
    )
    return b.moe(
        x,
        b.weight(router, (experts, hidden)),
        gate_up,
        out,
        top_k=int(config["num_experts_per_tok"]),
        normalize=bool(config.get("norm_topk_prob", True)),
        activation=activation_of(config),
    )


def rope_table(b: ProgramBuilder, config: Config, max_model_len: int, **differences: Any) -> RopeTable:
    """The table of a config's rope parameters, with a family's differences."""
    rope = {**config["rope_parameters"], **differences}
    found = rope_frequencies(config["rotary_dim"], rope, config["max_position_embeddings"], max_model_len)
    return b.rope_table(
        found.inv_freq,
        max_model_len,
        scale=found.scale,
        boundary=found.boundary,
        long_inv_freq=found.long_inv_freq,
    )


def embedding_weight(b: ProgramBuilder, config: Config) -> Weight:
    """The token embeddings."""
    return b.weight(
        "model.embed_tokens.weight", (config["vocab_size"], config["hidden_size"]), shard=Shard.ROWS
    )


def head(b: ProgramBuilder, config: Config, x: Buf, embed: Weight) -> Buf:
    """Logits [R, vocab] of the sampled rows of x."""
    weight = embed
    if not config["tie_word_embeddings"]:
        weight = b.weight("lm_head.weight", embed.shape, shard=Shard.ROWS)
    return b.linear(b.gather_sampled(x), weight)


def activation_of(config: Config) -> str:
    """Our name of a config's gated activation."""
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise UnsupportedModelError(f"activation {name[:80]!r} is not served; served: {', '.join(known)}")
    return known[name]


def window_of(config: Config, layer: int) -> int | None:
    """A layer's sliding window, from layer_types where the config has them."""
    window = config.get("sliding_window")
    if not window or (config["model_type"].startswith("qwen") and not config.get("use_sliding_window")):
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return int(window) if kinds[layer] == "sliding_attention" else None
    return int(window) if layer >= int(config.get("max_window_layers") or 0) else None


def stacked(b: ProgramBuilder, name: str, shape: tuple[int, ...], parts: list[str]) -> Weight:
    """A weight stacked by rows from tensors of the checkpoint."""
    return b.weight(name, shape, parts=tuple(parts), shard=Shard.ROWS)
