"""gpt-oss: experts with biases and a clamped activation, attention sinks, windows in every other layer.

OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card".
"""

from __future__ import annotations

from octavo.errors import UnsupportedModelError
from octavo.models.blocks import (
    Config,
    attention,
    attention_spec,
    embedding_weight,
    head,
    rope_table,
    stacked,
    window_of,
)
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf, Program

ARCHITECTURES = ("gpt_oss",)
#: Of the activation; both are in its contract.
_LIMIT, _ALPHA = 7.0, 1.702


def build(b: ProgramBuilder, config: Config, max_model_len: int) -> Program:
    """The program of a gpt-oss model, from its config under Hugging Face's keys."""
    for key, served in (("swiglu_limit", _LIMIT), ("swiglu_alpha", _ALPHA)):
        if config.get(key, served) != served:
            raise UnsupportedModelError(f"{key} {config[key]} is not served; {served} is")
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    bias = bool(config.get("attention_bias", True))
    rope = rope_table(b, config, max_model_len)
    embed = embedding_weight(b, config)
    residual = b.embedding(embed)
    x = b.rms_norm(residual, b.weight("model.layers.0.input_layernorm.weight", (hidden,)), eps=eps)
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        spec = attention_spec(
            config, rope, bias=bias, output_bias=bias, sinks=True, window=window_of(config, layer)
        )
        out = attention(b, f"{name}.self_attn", x, spec)
        norm = b.weight(f"{name}.post_attention_layernorm.weight", (hidden,))
        x, residual = b.add_rms_norm(out, residual, norm, eps=eps)
        out = _experts(b, f"{name}.mlp", x, config)
        following = f"model.layers.{layer + 1}.input_layernorm" if layer + 1 < layers else "model.norm"
        x, residual = b.add_rms_norm(out, residual, b.weight(f"{following}.weight", (hidden,)), eps=eps)
    return b.build(head(b, config, x, embed))


def _experts(b: ProgramBuilder, name: str, x: Buf, config: Config) -> Buf:
    """The checkpoint's stacked experts come as a tensor for each: see weights/quantized/gpt_oss.py."""
    hidden, width, experts = x.width, config["intermediate_size"], int(config["num_local_experts"])

    def of_all(what: str, parts: tuple[str, ...]) -> list[str]:
        return [f"{name}.experts.{e}.{part}.{what}" for e in range(experts) for part in parts]

    wide, narrow = ("gate_proj", "up_proj"), ("down_proj",)
    return b.moe(
        x,
        b.weight(f"{name}.router.weight", (experts, hidden)),
        stacked(b, f"{name}.experts.gate_up", (2 * width * experts, hidden), of_all("weight", wide)),
        stacked(b, f"{name}.experts.down", (hidden * experts, width), of_all("weight", narrow)),
        top_k=int(config["num_experts_per_tok"]),
        normalize=True,
        activation="clamped_swiglu",
        biases=(
            b.weight(f"{name}.router.bias", (experts,)),
            stacked(b, f"{name}.experts.gate_up_bias", (2 * width * experts,), of_all("bias", wide)),
            stacked(b, f"{name}.experts.down_bias", (hidden * experts,), of_all("bias", narrow)),
        ),
    )
