"""Writes a random Llama as config.json and model.safetensors in bf16, a tensor at a time."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, under the names that config.json has for them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; the head is tied to the embeddings."""
        hidden, wide = self.hidden_size, self.intermediate_size
        kv = hidden // self.num_attention_heads * self.num_key_value_heads
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_hidden_layers):
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes | {"model.norm.weight": (hidden,)}


def write(directory: Path, shape: Shape) -> Path:
    """Write the model; returns the path of its weights."""
    header, position = {}, 0
    for name, size in shape.tensors().items():
        end = position + 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    path = directory / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for size in shape.tensors().values():
            values = rng.normal(0, 0.02, size).astype(np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **asdict(shape)}
    (directory / "config.json").write_text(json.dumps(config))
    return path
