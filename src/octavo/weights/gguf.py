"""Reads GGUF files: metadata, and where each tensor's bytes lie.

Rule: nothing in the file is believed until it is checked against the size of the file, and nothing
is allocated by a count the file merely claims. What is wrong comes out as a `CheckpointError` that
names the file.

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata:     key | value type u32 | value                          (count times)
    tensor infos: name | n_dims u32 | dims u64[n_dims] | type u32 | offset u64
    padding to a multiple of general.alignment
    tensor data:  each tensor at its offset from here, aligned

Strings are a u64 length and that many bytes of UTF-8. Everything is little-endian. dims are stored
fastest first; `TensorInfo.shape` has numpy's order. Source: the GGUF specification of ggml.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from struct import error as StructError
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.weights import pages

DEFAULT_ALIGNMENT = 32
#: A metadata array may hold arrays; nobody nests deeper than two.
MAX_ARRAY_DEPTH = 4
#: Elements of all metadata arrays together. A list element costs several times its bytes in the
#: file, so without a cap a large file of small integers would take far more memory than disk.
MAX_ARRAY_ELEMENTS = 1 << 24
MAX_KEY_BYTES = 65535  # the specification's limit
MAX_TENSOR_NAME_BYTES = 1024  # the specification has 64
MAX_DIMS = 4
#: Parts that stacks may be taken apart into, all together: the largest mixtures have some ten thousands.
MAX_UNSTACKED = 1 << 20

#: ggml's type number -> (name, elements per block, bytes per block). A copy of what the gguf
#: package knows, since importing that package takes longer than reading a header.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

_U32 = Struct("<I")
_U64 = Struct("<Q")
_COUNTS = Struct("<QQ")
_TYPE_AND_OFFSET = Struct("<IQ")
_SMALLEST_METADATA = 8 + 4 + 1  # empty key, type, one byte
_SMALLEST_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # empty name, one dim

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: rows first; offset: bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file. The tensors' bytes stay in the page cache until somebody reads them.

    metadata: key -> int, float, bool, str, or a list of these. tensors: in the file's order.
    """

    def __init__(
        self, path: Path, mapped: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._mmap = mapped
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(mapped, np.uint8)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Map the file and read its header. Raises CheckpointError on anything but a sound file."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                # Mapping an empty file is a ValueError.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
        try:
            metadata, tensors = _read_header(_Reader(path, mapped))
        except BaseException:
            _unmap(mapped)
            raise
        return cls(path, mapped, metadata, tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored, [rows, bytes per row]: a read-only view onto the file.

        A tensor of one dimension is one row. The view stays valid after `close`.
        """
        info = self._info(name)
        if self._bytes is None:
            raise ValueError(f"{self.path} was closed; tensor {name!r} can't be read any more")
        rows = math.prod(info.shape[:-1])
        return self._bytes[info.offset : info.offset + info.nbytes].reshape(rows, -1)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 [*shape], in memory of its own."""
        info = self._info(name)
        try:
            return dequantize(self.raw(name), info.type_name).reshape(info.shape)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.path}: tensor {name!r}: {error}") from error

    def release(self, name: str) -> None:
        """Let go of the tensor's pages; a view onto them reads them again from the page cache."""
        info = self.tensors[name]
        if self._bytes is not None:
            pages.release(self._mmap, info.offset, info.nbytes)

    def unstack(self, names: Iterable[str]) -> None:
        """Replace each of these tensors [N, ...] by its N matrices or vectors: name[0], name[1], ..."""
        left = MAX_UNSTACKED
        for name in names:
            info = self._info(name)
            count = info.shape[0] if len(info.shape) in (2, 3) else 0
            left -= count
            parts = [f"{name}[{index}]" for index in range(count if left >= 0 else 0)]
            if not parts or not self.tensors.keys().isdisjoint(parts):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} of shape {list(info.shape)} is no stack, has its parts "
                    f"beside it, or makes them more than {MAX_UNSTACKED} in all"
                )
            nbytes = info.nbytes // count
            for index, part in enumerate(parts):
                offset = info.offset + index * nbytes
                self.tensors[part] = TensorInfo(part, info.shape[1:], info.type_name, offset, nbytes)
            del self.tensors[name]

    def close(self) -> None:
        """Let go of the file. Views handed out by `raw` keep the mapping alive for themselves."""
        self._bytes = None
        _unmap(self._mmap)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path} has no tensor {name!r} (it has {len(self.tensors)} others); the file is "
                "incomplete or of another architecture"
            ) from None


class _Reader:
    """A position in the header. Every step is checked against the end of the file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.data = mapped
        self.size = len(mapped)
        self.position = 0
        self._elements_left = MAX_ARRAY_ELEMENTS

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a sound GGUF file: {problem}")

    def advance(self, num_bytes: int, what: str) -> int:
        """Step over num_bytes and return where they begin."""
        start = self.position
        if num_bytes > self.size - start:
            self.fail(
                f"{what} at byte {start} needs {num_bytes} bytes, but the file ends after "
                f"{self.size - start}; it is truncated or damaged"
            )
        self.position = start + num_bytes
        return start

    def unpack(self, layout: Struct, what: str) -> tuple[Any, ...]:
        return layout.unpack_from(self.data, self.advance(layout.size, what))

    def check_count(self, count: int, smallest: int, what: str) -> None:
        """Refuse a count of things that could not fit even if each were as small as can be."""
        room = (self.size - self.position) // smallest
        if count > room:
            self.fail(f"it claims {count} {what}, but the rest of the file has room for at most {room}")

    def string(self, what: str, *, limit: int | None = None) -> str:
        (length,) = self.unpack(_U64, f"length of {what}")
        if limit is not None and length > limit:
            self.fail(f"{what} claims to be {length} bytes long; the limit is {limit}")
        start = self.advance(length, what)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} at byte {start} is not UTF-8 ({error.reason})")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth=1)
        return self.numbers(kind, 1, what)[0]

    def array(self, what: str, *, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        (kind,) = self.unpack(_U32, f"element type of {what}")
        (count,) = self.unpack(_U64, f"length of {what}")
        self._elements_left -= count
        if self._elements_left < 0:
            self.fail(f"{what} claims {count} elements; metadata arrays may hold {MAX_ARRAY_ELEMENTS} in all")
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            self.check_count(count, 4 + 8, f"arrays in {what}")
            return [self.array(what, depth=depth + 1) for _ in range(count)]
        return self.numbers(kind, count, what)

    def strings(self, count: int, what: str) -> list[str]:
        """Vocabulary and merges: some hundred thousand strings, so this is the loop that counts."""
        self.check_count(count, 8, f"strings in {what}")
        data, size, position = self.data, self.size, self.position
        unpack = _U64.unpack_from
        result: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    self.fail(
                        f"string {len(result)} of {what} ends at byte {position}; the file has only {size}"
                    )
                result.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            self.fail(f"string {len(result)} of {what} is not UTF-8 ({error.reason})")
        except StructError:
            self.fail(f"the file ends within string {len(result)} of {what}; it is truncated or damaged")
        self.position = position
        return result

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self.fail(f"{what} has the unknown value type {kind}")
        start = self.advance(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, start)
        if kind == _BOOL:
            if values.size and values.max() > 1:
                self.fail(f"{what} holds a boolean of value {values.max()}")
            values = values.astype(bool)
        return list(values.tolist())


def _unmap(mapped: mmap.mmap) -> None:
    with suppress(BufferError):  # views are left; the last of them unmaps it
        mapped.close()


def _read_header(reader: _Reader) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic = reader.data[:4]
    if magic != b"GGUF":
        reader.fail(f"it begins with {magic!r} instead of b'GGUF'")
    reader.position = 4
    (version,) = reader.unpack(_U32, "version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            reader.fail("it is big-endian; convert it on, or for, a little-endian machine")
        reader.fail(f"its version is {version}; versions 2 and 3 are read. Convert the model again")
    num_tensors, num_metadata = reader.unpack(_COUNTS, "counts")
    metadata = _read_metadata(reader, num_metadata)
    infos = list(_read_tensor_infos(reader, num_tensors))
    return metadata, _place_tensors(reader, infos, _alignment(reader, metadata))


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    reader.check_count(count, _SMALLEST_METADATA, "metadata entries")
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = reader.string(f"metadata key {index}", limit=MAX_KEY_BYTES)
        shown = repr(key[:200])
        if key in metadata:
            reader.fail(f"metadata key {shown} appears twice")
        (kind,) = reader.unpack(_U32, f"type of {shown}")
        metadata[key] = reader.value(kind, shown)
    return metadata


def _alignment(reader: _Reader, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {repr(alignment)[:80]}; it must be a power of two")
    return alignment


def _read_tensor_infos(reader: _Reader, count: int) -> Iterator[TensorInfo]:
    """Offsets are still relative to the start of the tensor data."""
    reader.check_count(count, _SMALLEST_TENSOR_INFO, "tensors")
    for index in range(count):
        name = reader.string(f"name of tensor {index}", limit=MAX_TENSOR_NAME_BYTES)
        (n_dims,) = reader.unpack(_U32, f"n_dims of tensor {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            reader.fail(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = reader.unpack(Struct(f"<{n_dims}Q"), f"dims of tensor {name!r}")
        kind, offset = reader.unpack(_TYPE_AND_OFFSET, f"type and offset of tensor {name!r}")
        if kind not in TENSOR_TYPES:
            reader.fail(f"tensor {name!r} has the unknown type {kind}")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        elements = math.prod(dims)
        if elements == 0 or elements >= 2**63:
            reader.fail(f"tensor {name!r} has the impossible dimensions {list(dims)}")
        if dims[0] % block:
            reader.fail(
                f"tensor {name!r} has rows of {dims[0]} elements, which is no multiple of the "
                f"{block} that a block of {type_name} holds"
            )
        yield TensorInfo(name, tuple(reversed(dims)), type_name, offset, elements // block * block_bytes)


def _place_tensors(reader: _Reader, infos: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Make offsets absolute; refuse what is misaligned, overlaps, or lies beyond the file."""
    data_start = (reader.position + alignment - 1) // alignment * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            reader.fail(f"tensor {info.name!r} appears twice")
        if info.offset % alignment:
            reader.fail(
                f"tensor {info.name!r} lies at offset {info.offset}, which is no multiple of {alignment}"
            )
        tensors[info.name] = TensorInfo(
            info.name, info.shape, info.type_name, data_start + info.offset, info.nbytes
        )
    previous: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if previous is not None and info.offset < previous.offset + previous.nbytes:
            reader.fail(f"tensors {previous.name!r} and {info.name!r} overlap at byte {info.offset}")
        previous = info
    if previous is not None and previous.offset + previous.nbytes > reader.size:
        missing = previous.offset + previous.nbytes - reader.size
        reader.fail(
            f"it is truncated: tensor {previous.name!r} ends {missing} bytes beyond the {reader.size} bytes "
            "that are there. Fetch the file again"
        )
    return tensors
