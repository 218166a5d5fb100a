"""A checkpoint in a directory of Hugging Face's layout: config.json and safetensors.

Rule: a directory is untrusted as a file is. The index says which tensor lies in which file; what it
does not list, or what is not where it says, is refused by the file's name. Pickled weights are never
opened: reading a pickle can run code.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.checkpoint import Checkpoint, TensorFile, TensorInfo
from octavo.weights.hf_config import normalised
from octavo.weights.model_directory import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SINGLE,
    read_json_object,
)
from octavo.weights.quantized.view import open_quantized
from octavo.weights.safetensors import SafetensorsFile

#: Kept by files of older versions of transformers; models compute it anew.
_RECOMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class SafetensorsCheckpoint(Checkpoint):
    """A directory. generation_config: what generation_config.json says; {} if there is none."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.metadata = {}
        self._raw_config = read_json_object(path / CONFIG, MAX_CONFIG_BYTES)
        architecture = self._raw_config.get("model_type")
        if not isinstance(architecture, str):
            raise CheckpointError(
                f"{path / CONFIG}: model_type is {str(architecture)[:80]!r}; it must name the family"
            )
        self.architecture = architecture
        self.generation_config: dict[str, Any] = {}
        if (path / GENERATION_CONFIG).exists():
            self.generation_config = read_json_object(path / GENERATION_CONFIG, MAX_CONFIG_BYTES)
        self._files: list[SafetensorsFile] = []
        try:
            stored = self._open_files()
            self._quantized = open_quantized(self._raw_config, path / CONFIG, stored)
        except BaseException:
            self.close()
            raise
        self._by_tensor: Mapping[str, TensorFile] = self._quantized.files if self._quantized else stored

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """config.json, and the keys that `hf_config` derives; CheckpointError for what makes no sense."""
        return normalised(self._raw_config, self.path / CONFIG, has_head=self.has("lm_head.weight"))

    @property
    def notes(self) -> list[str]:
        """See Checkpoint; and how quantised weights are read."""
        return [*(self._quantized.notes if self._quantized else []), *super().notes]

    def has(self, name: str) -> bool:
        """Whether a tensor is there."""
        return name in self._by_tensor

    def close(self) -> None:
        """Unmap the files."""
        for file in self._files:
            file.close()

    def _open_files(self) -> dict[str, SafetensorsFile]:
        """The file of each tensor."""
        if (self.path / SINGLE).exists():
            file = self._open(self.path / SINGLE)
            return dict.fromkeys(file.tensors, file)
        if not (self.path / INDEX).exists():
            raise _without_weights(self.path)
        weight_map = self._read_index()
        by_name: dict[str, SafetensorsFile] = {}
        for shard in dict.fromkeys(weight_map.values()):
            if not (self.path / shard).is_file():
                raise CheckpointError(f"{self.path / shard} is missing, but {INDEX} lists it; fetch it again")
            by_name[shard] = self._open(self.path / shard)
            unlisted = [name for name in by_name[shard].tensors if weight_map.get(name) != shard]
            if unlisted:
                raise CheckpointError(
                    f"{self.path / shard} holds tensors that {INDEX} does not list there: {_some(unlisted)}"
                )
        for name, shard in weight_map.items():
            if name not in by_name[shard].tensors:
                raise CheckpointError(
                    f"{self.path / shard} lacks tensor {name[:200]!r}, which {INDEX} lists there"
                )
        return {name: by_name[shard] for name, shard in weight_map.items()}

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile.open(path)
        self._files.append(file)
        return file

    def _read_index(self) -> dict[str, str]:
        path = self.path / INDEX
        weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: it has no weight_map, which says where each tensor lies")
        for shard in weight_map.values():
            # A name only: a path could lead out of the directory.
            if not isinstance(shard, str) or not re.fullmatch(r"[\w.-]{1,240}\.safetensors", shard):
                raise CheckpointError(
                    f"{path}: {str(shard)[:200]!r} is not the name of a safetensors file in the directory"
                )
        return weight_map

    def _place(self, name: str) -> tuple[TensorFile, TensorInfo]:
        file = self._by_tensor.get(name)
        if file is None:
            raise CheckpointError(f"{self.path.name}: tensor {name!r} is missing")
        return file, file.tensors[name]

    def _row_order(self, name: str) -> None:
        return None

    def _unused(self, names: set[str]) -> Collection[str]:
        left = {name for name in self._by_tensor.keys() - names if not _RECOMPUTED.fullmatch(name)}
        packed = self._quantized.tensors if self._quantized else {}
        if self.config["tie_word_embeddings"] and "lm_head.weight" not in packed:
            left.discard("lm_head.weight")  # some files keep the tied copy
        return self._quantized.without_idle(left) if self._quantized else left


def _without_weights(path: Path) -> CheckpointError | UnsupportedModelError:
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pth", ".pt"))
    if pickled:
        return UnsupportedModelError(
            f"{path} has its weights as {_some(pickled)} only. Those are pickles, and reading a pickle can "
            "run code, so they are not opened. Where you trust the model, make safetensors of it: "
            f"`octavo convert {path} OUT`"
        )
    return CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}; fetch the model again")


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:200] for name in names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
