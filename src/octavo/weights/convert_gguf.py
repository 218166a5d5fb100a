"""A GGUF file as a source for `octavo convert`.

Rule: its config under Hugging Face's keys, as its checkpoint gives it, becomes a config.json that other
programs read too; tensors get Hugging Face's names and row order. What stands for a tokenizer is not made
here: strings are another room's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.weights.checkpoint import Checkpoint, TensorRows
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
    "granite": "GraniteForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class DequantizedTensor:
    """A tensor of a GGUF file: quantised types are handed out as f32 and kept as f16."""

    name: str
    shape: tuple[int, ...]
    rows: TensorRows

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
        return dequantize(some, self.rows.type_name).view(np.uint8)


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
    tensors = []
    for name in names:
        shape = checkpoint.shape(name)
        tensors.append(DequantizedTensor(name, shape, checkpoint.rows(name, shape)))
    return Source(
        path=checkpoint.path,
        config=_config(checkpoint, bos_id, eos_ids),
        tensors=tensors,
        files=files,
        nbytes=checkpoint.path.stat().st_size,
    )


def _config(checkpoint: Checkpoint, bos_id: int | None, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    config = dict(checkpoint.config)
    family = config["model_type"]
    if family not in _CLASSES:
        raise UnsupportedModelError(
            f"{checkpoint.path.name}: {family!r} models are not converted from GGUF; those of "
            f"{', '.join(sorted(_CLASSES))} are"
        )
    rotated = config.pop("rotary_dim")
    rope = dict(config["rope_parameters"])
    if "rope_theta" in rope:  # one for all layers; version 4 of transformers has it on its own
        config["rope_theta"] = rope["rope_theta"]
        if rotated != config["head_dim"]:
            rope["partial_rotary_factor"] = config["partial_rotary_factor"] = rotated / config["head_dim"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        config["rope_parameters"] = rope
    ends = {"eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)} if eos_ids else {}
    return {
        "architectures": [_CLASSES[family]],
        **config,
        "bos_token_id": bos_id,
        **(ends or {"eos_token_id": None}),
    }
