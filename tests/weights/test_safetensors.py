"""The header parser against the safetensors package, and against everything that can be wrong."""

from __future__ import annotations

import json
import math
import random
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import CheckpointError
from octavo.weights import safetensors
from octavo.weights.safetensors import SafetensorsFile


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file of this header. header: an object to write as JSON, or the bytes themselves."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.unlink(missing_ok=True)  # a file that is mapped must not change
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def test_what_the_safetensors_package_writes(path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=7).astype(np.float16),
        "c": rng.integers(-9, 9, (2, 3, 4)),
        "scalar": np.array(1.5, np.float32),
    }
    save_file(tensors, path, metadata={"format": "np"})
    file = SafetensorsFile.open(path)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        info = file.tensors[name]
        assert info.shape == values.shape
        rows = math.prod(values.shape[:-1])
        raw = file.raw(name)
        assert np.array_equal(raw, np.frombuffer(values.tobytes(), np.uint8).reshape(rows, -1))
        assert not raw.flags.writeable
    assert [file.tensors[name].type_name for name in "abc"] == ["F32", "F16", "I64"]
    file.close()
    assert np.array_equal(raw, raw)  # a view outlives the file
    with pytest.raises(ValueError, match="was closed"):
        file.raw("a")


def test_a_header_may_be_padded_and_empty(path: Path) -> None:
    assert SafetensorsFile.open(write(path, b'{"__metadata__": {"a": "b"}}    ')).tensors == {}


GOOD = {"a": entry([2], 0, 8), "b": entry([1, 3], 8, 14, "BF16")}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "no JSON object"),
        (b'{"a"', "header can't be read"),
        (b"\xff\xfe", "header can't be read"),
        (b"[" * 100_000, "header can't be read"),
        (b'{"a": ' + b"9" * 5000 + b"}", "header can't be read"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        ({**GOOD, "a": 3}, "'a' is not described by"),
        ({**GOOD, "a": {"dtype": "F32", "shape": [2]}}, "'a' is not described by"),
        ({**GOOD, "a": entry([2], 0, 8) | {"more": 1}}, "'a' is not described by"),
        ({**GOOD, "a": entry([2], 0, 8, "F128")}, "unknown dtype 'F128'"),
        ({**GOOD, "a": entry([2], 0, 8) | {"dtype": ["F32"]}}, "unknown dtype"),
        ({**GOOD, "a": entry([-2], 0, 8)}, "impossible shape"),
        ({**GOOD, "a": entry([2.0], 0, 8)}, "impossible shape"),  # type: ignore[list-item]
        ({**GOOD, "a": entry([True], 0, 8)}, "impossible shape"),
        ({**GOOD, "a": entry([1] * 9, 0, 8)}, "impossible shape"),
        ({**GOOD, "a": entry([2**64], 0, 8)}, "impossible shape"),
        ({**GOOD, "a": entry([2], 0, 8) | {"data_offsets": [0]}}, "impossible data_offsets"),
        ({**GOOD, "a": entry([2], -8, 8)}, "impossible data_offsets"),
        ({**GOOD, "a": entry([2], 8, 0)}, "lies at bytes 8 to 0 of the 14"),
        (
            {**GOOD, "b": entry([1, 3], 9, 15, "BF16")},
            "lies at bytes 9 to 15 of the 14 .* fetch the file again",
        ),
        ({**GOOD, "a": entry([3], 0, 8)}, r"'a' of F32 \[3\] takes 12 bytes, but has 8"),
        ({**GOOD, "a": entry([2**62, 2**62], 0, 8)}, "takes .* bytes, but has 8"),
        ({**GOOD, "b": entry([1, 3], 4, 10, "BF16")}, "overlaps what is before it"),
        ({**GOOD, "c": entry([2], 0, 8)}, "overlaps what is before it"),
        ({**GOOD, "a": entry([1], 0, 4)}, "leaves a hole before it"),
        ({"a": entry([2], 0, 8)}, "6 bytes at its end belong to no tensor"),
    ],
)
def test_impossible_headers(path: Path, header: Any, message: str) -> None:
    write(path, GOOD, bytes(14))
    SafetensorsFile.open(path).close()
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: .*{message}"):
        SafetensorsFile.open(write(path, header, bytes(14)))


def test_files_that_are_no_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (path, path.parent):
        with pytest.raises(CheckpointError, match="cannot be read as a safetensors file"):
            SafetensorsFile.open(ask)
    for data in (b"", b"\x01", b"\0" * 7):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            SafetensorsFile.open(path)
    for length in (3, 2**40, 2**64 - 1):
        with pytest.raises(CheckpointError, match=f"claims a header of {length}; fetch the file again"):
            SafetensorsFile.open(write(path, b"{}", length=length))
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 10)
    with pytest.raises(CheckpointError, match="its header has 11 bytes; the limit is 10"):
        SafetensorsFile.open(write(path, b"{}" + b" " * 9))


def test_damaged_files_raise_nothing_but_checkpoint_errors(path: Path) -> None:
    """400 files: cut anywhere, bytes changed, headers with numbers replaced; in little time and memory."""
    save_file({f"t{i}": np.zeros((i + 1, 4), np.float32) for i in range(5)}, path)
    good = path.read_bytes()
    end = 8 + struct.unpack("<Q", good[:8])[0]
    rng = random.Random(0)
    messages = []
    started = time.perf_counter()
    tracemalloc.start()
    for index in range(400):
        data = bytearray(good)
        match index % 4:
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(end)] = rng.randrange(256)
            case 2:
                digits = [i for i in range(8, end) if 0x30 <= data[i] <= 0x39]
                at = rng.choice(digits)
                data[at : at + 1] = str(rng.choice([0, 7, -1, 2**31, 2**63, 2**80, 1e300])).encode()
                data[:8] = struct.pack("<Q", end - 8 + len(data) - len(good))
            case 3:
                begin = rng.randrange(8, end)
                del data[begin : begin + rng.randint(1, 40)]
        path.unlink()
        path.write_bytes(bytes(data))
        try:
            file = SafetensorsFile.open(path)
        except CheckpointError as error:
            messages.append(str(error))
        else:
            for name in file.tensors:
                file.raw(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(messages) > 300
    assert all(str(path) in message and len(message) < 1000 for message in messages)
    assert peak < 16 << 20
    assert time.perf_counter() - started < 20


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    save_file({"w": values}, tmp_path / "model.safetensors")
    file = SafetensorsFile.open(tmp_path / "model.safetensors")
    view = file.raw("w")
    assert np.array_equal(view.view(np.float32), values)
    resident = resident_bytes(view)
    file.release("w")
    assert resident_bytes(view) < resident - (3 << 20)
    assert np.array_equal(view.view(np.float32), values)


def resident_bytes(view: np.ndarray) -> int:
    """Bytes of the mapping that holds `view` that this process has in memory."""
    address, inside = view.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(number, 16) for number in head.split("-"))
            inside = begin <= address < end
        elif inside and head == "Rss:":
            return int(line.split()[1]) << 10
    raise AssertionError("no mapping holds it")
