"""What a GGUF file calls a tensor, and in which order it keeps its rows.

Model files use Hugging Face's names. GGUF has its own, and llama.cpp's converter reorders the rows of q
and k of some families for interleaved rotation. Rule: whatever a file did to a tensor is undone here and
in `gguf_config`, so that one program serves every format. Source: gguf-py's tensor_mapping.py.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
#: Families whose post_attention_layernorm GGUF calls so too.
_POST_ATTENTION_NORM = frozenset({"gemma2", "gemma3_text", "olmo2", "gpt_oss"})
#: A layer's experts are stacked: [experts, rows, width], biases [experts, rows].
_EXPERT = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_STACK = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)")
#: Families whose q and k rows llama.cpp's converter interleaves.
INTERLEAVED_FAMILIES = frozenset({"llama", "mistral", "mixtral", "smollm3", "granite"})


def gguf_name(name: str, family: str) -> str:
    """The GGUF name of a tensor that Hugging Face calls `name` in models of `family` (its model_type);
    KeyError if there is none. What a stack holds of expert e is "<stack>[e]", see `GGUFFile.unstack`.
    """
    if name.endswith(".sinks"):
        name += ".weight"
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        raise KeyError(name)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = _LAYER_NAME.fullmatch(stem)
    if match is None:
        raise KeyError(name)
    layer, module = match.groups()
    expert = _EXPERT_NAME.fullmatch(module)
    if expert is not None and expert[2] in _EXPERT:
        return f"blk.{layer}.{_EXPERT[expert[2]]}.{kind}[{expert[1]}]"
    if module not in _LAYER:
        raise KeyError(name)
    if module == "post_attention_layernorm" and family in _POST_ATTENTION_NORM:
        return f"blk.{layer}.post_attention_norm.{kind}"
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def is_stack(name: str) -> bool:
    """Whether a GGUF name is that of a layer's stacked experts."""
    return _STACK.fullmatch(name) is not None


def deinterleaved_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.int32]:
    """Row i of the tensor as Hugging Face orders it is row [i] of the interleaved one.

    Within a head, a pair (i, i + D/2) lies at (2 i, 2 i + 1).
    """
    within = np.arange(head_dim, dtype=np.int32).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(num_heads, dtype=np.int32)[:, None] * head_dim
    return (heads + within[None, :]).reshape(-1)
