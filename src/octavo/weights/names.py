"""What each checkpoint calls a tensor, and in which order it keeps its rows.

Model files use Hugging Face's names. GGUF has its own, and llama.cpp's converter reorders the rows of q
and k for interleaved rotation. Rule: whatever a file did to a tensor is undone here, so that one
program serves every format.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
#: Architectures whose tensors and metadata are known here by GGUF's names.
GGUF_ARCHITECTURES = frozenset({"llama"})
#: Architectures whose q and k rows llama.cpp's converter interleaves.
INTERLEAVED_ARCHITECTURES = frozenset({"llama"})


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor that Hugging Face calls `name`; KeyError if there is none."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        raise KeyError(name)
    return f"blk.{match[1]}.{_GGUF_LAYER[match[2]]}"


def deinterleaved_rows(num_heads: int, head_dim: int) -> npt.NDArray[np.int32]:
    """Row i of the tensor as Hugging Face orders it is row [i] of the interleaved one.

    Within a head, a pair (i, i + D/2) lies at (2 i, 2 i + 1).
    """
    within = np.arange(head_dim, dtype=np.int32).reshape(head_dim // 2, 2).T.reshape(-1)
    heads = np.arange(num_heads, dtype=np.int32)[:, None] * head_dim
    return (heads + within[None, :]).reshape(-1)
