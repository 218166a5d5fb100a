"""What `octavo convert` reads: tensors by Hugging Face's names, some rows at a time.

Rule: a source hands out bytes of rows and nothing else is known of where they come from. Reading a pickle
can run code, so `convert_pickles` alone opens them, and only for what holds no code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights.hub import is_beside
from octavo.weights.model_directory import (
    CONFIG,
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SINGLE,
    read_json_object,
)
from octavo.weights.safetensors import SafetensorsFile

#: Taken along besides what is fetched from a hub: for other programs, and the licence.
_ALSO_TAKEN = re.compile(
    r"vocab\.(json|txt)|merges\.txt|(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]*", re.ASCII | re.IGNORECASE
)


class SourceTensor(Protocol):
    """A tensor of a source. dtype: of what `read` returns; kept_as: the dtype it has if none is asked for.
    A vector, or a single number, is one row."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kept_as(self) -> str: ...
    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Bytes of rows [start, stop), uint8 [rows, nbytes of a row]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model to convert.

    config: config.json's content. tensors: in the order they are written. files: what to take along, by
    name: a file to copy, or text. nbytes: of the files that hold the weights. is_safetensors: whether they
    are safetensors already.
    """

    path: Path
    config: dict[str, Any]
    tensors: Sequence[SourceTensor]
    files: Mapping[str, Path | str]
    nbytes: int
    is_safetensors: bool = False


def num_rows(shape: tuple[int, ...]) -> int:
    """Rows of a tensor."""
    return math.prod(shape[:-1])


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """A tensor of a safetensors file."""

    file: SafetensorsFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return self.file.tensors[self.name].shape

    @property
    def dtype(self) -> str:
        """The stored one."""
        return self.file.tensors[self.name].type_name

    @property
    def kept_as(self) -> str:
        """The stored one."""
        return self.dtype

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """See SourceTensor."""
        return self.file.raw(self.name)[start:stop]


def open_directory(path: Path) -> Source:
    """A directory in Hugging Face's layout, its weights as safetensors or, failing that, as pickles."""
    config = read_json_object(path / CONFIG, MAX_CONFIG_BYTES)
    if not (path / SINGLE).is_file() and not (path / INDEX).is_file():
        from octavo.weights.convert_pickles import open_pickles  # imports torch

        return open_pickles(path, config, taken_along(path))
    names = [SINGLE]
    weight_map: Mapping[str, Any] = {}
    if not (path / SINGLE).is_file():
        weight_map = shard_names(path / INDEX, "safetensors")
        names = list(dict.fromkeys(weight_map.values()))
    files = [SafetensorsFile.open(path / name) for name in names]
    tensors = [SafetensorsTensor(file, name) for file in files for name in file.tensors]
    if weight_map and sorted(tensor.name for tensor in tensors) != sorted(weight_map):
        raise CheckpointError(f"{path / INDEX} and its files do not list the same tensors; fetch them again")
    nbytes = sum((path / name).stat().st_size for name in names)
    return Source(
        path=path, config=config, tensors=tensors, files=taken_along(path), nbytes=nbytes, is_safetensors=True
    )


def taken_along(path: Path) -> dict[str, Path]:
    """Files of a model's directory that are copied as they are."""
    found = {str(file.relative_to(path)): file for file in (*path.glob("*"), *path.glob("*/*"))}
    return {
        name: file
        for name, file in sorted(found.items())
        if (is_beside(name) or _ALSO_TAKEN.fullmatch(name)) and file.is_file()
    }


def shard_names(index: Path, suffix: str) -> dict[str, str]:
    """An index's weight_map: the file of each tensor, all of them names in the directory."""
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: it has no weight_map, which says where each tensor lies")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not re.fullmatch(rf"[\w.-]{{1,240}}\.{suffix}", shard, re.ASCII):
            raise CheckpointError(f"{index}: {str(shard)[:200]!r} is no name of a .{suffix} file beside it")
    for shard in dict.fromkeys(weight_map.values()):
        if not (index.parent / shard).is_file():
            raise CheckpointError(f"{index.parent / shard} is missing, but {index.name} lists it")
    return weight_map
