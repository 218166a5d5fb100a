"""Reads safetensors files: where each tensor's bytes lie.

Rule: as for GGUF, nothing in the file is believed until it is checked against the size of the file. What
is wrong comes out as a `CheckpointError` that names the file.

    header length u64 | header, JSON | tensor data

    header: {"name": {"dtype": "BF16", "shape": [rows, K], "data_offsets": [begin, end]}, ...}

Offsets count from the start of the tensor data, which the tensors fill without holes. The key
"__metadata__" holds strings. Everything is little-endian. Source: the safetensors format description.
"""

from __future__ import annotations

import json
import math
import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.weights import pages
from octavo.weights.model_directory import unique_keys

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 8
#: Bytes of an element. A dtype that no weight is computed with is still a sound one.
DTYPES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """Where a tensor lies. type_name: its dtype; offset: bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file. The tensors' bytes stay in the page cache until somebody reads them."""

    def __init__(self, path: Path, mapped: mmap.mmap, tensors: dict[str, SafetensorsInfo]) -> None:
        self.path = path
        self.tensors = tensors
        self._mmap = mapped
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the file and read its header. Raises CheckpointError on anything but a sound file."""
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ValueError if it is empty
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        try:
            tensors = _read_header(path, mapped)
        except BaseException:
            mapped.close()
            raise
        return cls(path, mapped, tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, [rows, bytes per row]: a read-only view onto the file. A tensor of one
        dimension is one row. The view stays valid after `close`."""
        if self._bytes is None:
            raise ValueError(f"{self.path} was closed; tensor {name!r} can't be read any more")
        info = self.tensors[name]
        rows = math.prod(info.shape[:-1])
        return self._bytes[info.offset : info.offset + info.nbytes].reshape(rows, -1)

    def release(self, name: str) -> None:
        """Let go of the tensor's pages; a view onto them reads them again from the page cache."""
        info = self.tensors[name]
        if self._bytes is not None:
            pages.release(self._mmap, info.offset, info.nbytes)

    def close(self) -> None:
        """Let go of the file. Views handed out by `raw` keep the mapping alive for themselves."""
        self._bytes = None
        with suppress(BufferError):  # views are left; the last of them unmaps it
            self._mmap.close()


def _read_header(path: Path, mapped: mmap.mmap) -> dict[str, SafetensorsInfo]:
    size = len(mapped)
    length = int.from_bytes(mapped[:8], "little")
    if size < 8 or length > size - 8:
        _fail(path, f"it has {size} bytes, but claims a header of {length}; fetch the file again")
    if length > MAX_HEADER_BYTES:
        _fail(path, f"its header has {length} bytes; the limit is {MAX_HEADER_BYTES}")
    header = _parse(path, mapped[8 : 8 + length])
    if not isinstance(header, dict):
        _fail(path, "its header is no JSON object")
    header.pop("__metadata__", None)  # says who wrote the file; nothing that a model needs
    start, room = 8 + length, size - 8 - length
    tensors = {name: _info(path, name, entry, start, room) for name, entry in header.items()}
    position = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            what = "overlaps what is before it" if info.offset < position else "leaves a hole before it"
            _fail(path, f"tensor {info.name!r} begins at byte {info.offset} and {what}, byte {position}")
        position += info.nbytes
    if position != size:
        _fail(path, f"{size - position} bytes at its end belong to no tensor")
    return tensors


def _parse(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header can't be read: {_short(error)}")


def _info(path: Path, name: str, entry: Any, start: int, room: int) -> SafetensorsInfo:
    """A tensor's place; `start` and `room`: where the data begin, and how many bytes they have."""
    shown = repr(name[:200])
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"tensor {shown} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _fail(path, f"tensor {shown} has the unknown dtype {_short(dtype)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        _fail(path, f"tensor {shown} has the impossible shape {_short(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2:
        _fail(path, f"tensor {shown} has the impossible data_offsets {_short(offsets)}")
    begin, end = offsets
    if not begin <= end <= room:
        _fail(
            path,
            f"tensor {shown} lies at bytes {begin} to {end} of the {room} bytes of data that are there; "
            "it is truncated or damaged, fetch the file again",
        )
    nbytes = math.prod(shape) * DTYPES[dtype]
    if nbytes != end - begin:
        _fail(path, f"tensor {shown} of {dtype} {shape} takes {nbytes} bytes, but has {end - begin}")
    return SafetensorsInfo(name, tuple(shape), dtype, start + begin, nbytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _fail(path: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}")
