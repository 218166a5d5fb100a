"""A GGUF file as a source for `octavo convert`.

Rule: its config under Hugging Face's keys, as its checkpoint gives it, becomes a config.json that other
programs read too; tensors get Hugging Face's names and row order. What stands for a tokenizer is not made
here: strings are another room's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.quantization.conversion import StoredRows, dequantize
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.convert_sources import Source

#: The class that Hugging Face's library has for a family: other programs choose theirs by it.
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class DequantizedTensor:
    """A tensor of a GGUF file: quantised types are handed out as f32 and kept as f16. offset: added to
    its elements."""

    name: str
    shape: tuple[int, ...]
    rows: StoredRows
    offset: float = 0.0

    @property
    def dtype(self) -> str:
        """Of what is read."""
        return "F32"

    @property
    def kept_as(self) -> str:
        """The stored float type; f16 for what is quantised, whose own steps are far coarser."""
        return self.rows.type_name if self.rows.type_name in _FLOATS else "F16"

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """See SourceTensor."""
        raw, order = self.rows.raw, self.rows.row_order
        some = raw[start:stop] if order is None else raw[order[start:stop]]
        values = dequantize(some, self.rows.type_name)
        return (values + np.float32(self.offset) if self.offset else values).view(np.uint8)


def open_gguf(
    checkpoint: Checkpoint,
    names: Iterable[str],
    files: Mapping[str, str],
    *,
    bos_id: int | None,
    eos_ids: tuple[int, ...],
) -> Source:
    """names: of all its tensors, as Hugging Face calls them. files: the tokenizer's, by name, as text.

    Raises UnsupportedModelError for a family whose config can't be written.
    """
    config = dict(checkpoint.config)
    # Gemma's norms add 1 to their weights, llama.cpp's converter adds it to what it writes.
    offset = config.pop("norm_offset", 1.0) - 1.0
    tensors = []
    for name in names:
        shape = checkpoint.shape(name)
        of_norm = len(shape) == 1 and name.endswith("norm.weight")
        rows = checkpoint.rows(name, shape)
        tensors.append(DequantizedTensor(name, shape, rows, offset if of_norm else 0.0))
    return Source(
        path=checkpoint.path,
        config=_config(checkpoint.path, config, bos_id, eos_ids),
        tensors=tensors,
        files=files,
        nbytes=checkpoint.path.stat().st_size,
    )


def _config(
    path: Path, config: dict[str, Any], bos_id: int | None, eos_ids: tuple[int, ...]
) -> dict[str, Any]:
    """config.json of both spellings: versions 4 and 5 of transformers say differently how to rotate."""
    family = config["model_type"]
    if family not in _CLASSES:
        raise UnsupportedModelError(
            f"{path.name}: {family!r} models are not converted from GGUF; those of "
            f"{', '.join(sorted(_CLASSES))} are"
        )
    partial = config.pop("rotary_dim") / config["head_dim"]
    rope = dict(config["rope_parameters"])
    if "full_attention" in rope:  # layers of two kinds
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        whole = rope["full_attention"]
    else:
        whole = rope
        if partial != 1:
            config["partial_rotary_factor"] = rope["partial_rotary_factor"] = partial
    config["rope_parameters"] = rope
    config["rope_theta"] = whole["rope_theta"]
    if whole["rope_type"] != "default":
        config["rope_scaling"] = {key: value for key, value in whole.items() if key != "rope_theta"}
    if family == "qwen3_moe":
        config["num_experts"] = config["num_local_experts"]
    return {
        "architectures": [_CLASSES[family]],
        **config,
        "bos_token_id": bos_id,
        "eos_token_id": (eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)) if eos_ids else None,
        "pad_token_id": None,  # a family's own may lie beyond this vocabulary
    }
