"""Writes a model's tensors as safetensors, in files of a few gigabytes with an index.

Rule: shapes are planned first, so that every tensor's place is known and its rows can be written as they
come, in any order; nothing is kept in memory. Tensors whose elements are wider come first in a file, which
keeps all of them aligned. Source: the safetensors format description; the layout of `safetensors.py`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from octavo.weights.model_directory import INDEX, SINGLE
from octavo.weights.safetensors import DTYPES

MAX_SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be written. dtype: as safetensors calls it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * DTYPES[self.dtype]


class SafetensorsWriter:
    """Open files with a place for each planned tensor. file_names: in order, without the index."""

    def __init__(self, places: dict[str, tuple[IO[bytes], int]], ends: dict[str, int], file_names: list[str]):
        self._places = places
        self._ends = ends
        self.file_names = file_names

    def append(self, name: str, data: npt.NDArray[np.generic]) -> None:
        """Write the next elements of a tensor; data is contiguous and little-endian."""
        file, position = self._places[name]
        if position + data.nbytes > self._ends[name]:
            raise ValueError(f"tensor {name!r} gets more bytes than were planned")
        file.seek(position)
        file.write(data.data)
        self._places[name] = file, position + data.nbytes

    def check_complete(self) -> None:
        """Raise ValueError if a tensor lacks bytes."""
        short = [name for name, (_, position) in self._places.items() if position != self._ends[name]]
        if short:
            raise ValueError(f"tensors {short[:4]} were not written to their end")


@contextmanager
def safetensors_writer(
    folder: Path, tensors: Sequence[PlannedTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> Iterator[SafetensorsWriter]:
    """Lay out the files in `folder` and open them; on the way out, check that all was written."""
    shards = _cut(tensors, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    places: dict[str, tuple[IO[bytes], int]] = {}
    ends: dict[str, int] = {}
    with ExitStack() as stack:
        files = [stack.enter_context((folder / name).open("wb")) for name in names]
        for file, shard in zip(files, shards, strict=True):
            header = _header(shard)
            file.write(header)
            position = len(header)
            for tensor in _ordered(shard):
                places[tensor.name] = file, position
                position += tensor.nbytes
                ends[tensor.name] = position
            file.truncate(position)
        writer = SafetensorsWriter(places, ends, names)
        yield writer
        writer.check_complete()
        for file in files:
            file.flush()
            os.fsync(file.fileno())


def _cut(tensors: Sequence[PlannedTensor], limit: int) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _ordered(shard: Sequence[PlannedTensor]) -> list[PlannedTensor]:
    return sorted(shard, key=lambda tensor: (-DTYPES[tensor.dtype], tensor.name))


def _header(shard: Sequence[PlannedTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in _ordered(shard):
        offsets = [position, position + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
