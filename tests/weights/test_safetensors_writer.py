"""Writing safetensors: the `safetensors` library reads what was written, and so does our own reader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.weights.safetensors import SafetensorsFile
from octavo.weights.safetensors_writer import PlannedTensor, safetensors_writer

DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8, "I32": np.int32}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [
        ("a", "U8", (3,)),
        ("b", "F32", (4, 5)),
        ("c", "F16", (7, 3)),
        ("d", "I64", ()),
        ("e", "I32", (2, 3, 4)),
    ]
    return {name: rng.integers(0, 100, shape).astype(DTYPES[dtype]) for name, dtype, shape in shapes}


def plan(values: dict[str, np.ndarray]) -> list[PlannedTensor]:
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    return [PlannedTensor(name, value.shape, names[value.dtype]) for name, value in values.items()]


@pytest.mark.parametrize("limit", [10**9, 100, 1])
def test_the_library_reads_the_same(tmp_path: Path, limit: int) -> None:
    values = tensors()
    with safetensors_writer(tmp_path, plan(values), limit) as writer:
        for name in reversed(values):  # rows of several tensors, in any order
            flat = values[name].reshape(-1)
            writer.append(name, flat[:2])
            writer.append(name, flat[2:])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == sorted(writer.file_names)
    read: dict[str, np.ndarray] = {}
    for file in files:
        read |= load_file(file)
        ours = SafetensorsFile.open(file)
        assert all(info.offset % values[name].itemsize == 0 for name, info in ours.tensors.items())
        ours.close()
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)
    if limit == 10**9:
        assert writer.file_names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
        assert {
            name: name in load_file(tmp_path / file) for name, file in index["weight_map"].items()
        } == dict.fromkeys(values, True)
        assert len(files) == (5 if limit == 1 else 3)


def test_too_little_and_too_much_are_noticed(tmp_path: Path) -> None:
    planned = [PlannedTensor("a", (2, 2), "F32")]
    with (
        pytest.raises(ValueError, match="were not written to their end"),
        safetensors_writer(tmp_path, planned) as writer,
    ):
        writer.append("a", np.zeros(3, np.float32))
    with (
        pytest.raises(ValueError, match="more bytes than were planned"),
        safetensors_writer(tmp_path, planned) as writer,
    ):
        writer.append("a", np.zeros(5, np.float32))
