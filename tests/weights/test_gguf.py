"""Reads real and hostile GGUF files. Oracle: the gguf package's reader, writer and tables."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights import gguf as octavo_gguf
from octavo.weights.gguf import TENSOR_TYPES, GGUFFile

F32, Q8_0 = 0, 8
UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + elements


@dataclass
class Tensor:
    """A tensor info as it is written, truthful or not."""

    name: str = "w"
    dims: tuple[int, ...] = (8,)
    kind: int = F32
    offset: int = 0
    n_dims: int | None = None

    def encode(self) -> bytes:
        n_dims = len(self.dims) if self.n_dims is None else self.n_dims
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return (
            string(self.name) + struct.pack("<I", n_dims) + dims + struct.pack("<IQ", self.kind, self.offset)
        )


def write_gguf(
    path: Path,
    *,
    metadata: tuple[bytes, ...] = (),
    tensors: tuple[Tensor, ...] = (Tensor(),),
    data: bytes = bytes(32),
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_metadata: int | None = None,
    alignment: int = 32,
) -> Path:
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_metadata = len(metadata) if num_metadata is None else num_metadata
    header = magic + version + struct.pack("<QQ", num_tensors, num_metadata)
    header += b"".join(metadata) + b"".join(tensor.encode() for tensor in tensors)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    ours = {number: (block, size) for number, (_, block, size) in TENSOR_TYPES.items()}
    assert ours == {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: name for number, (name, _, _) in TENSOR_TYPES.items()} == {
        int(kind): kind.name for kind in gguf.GGML_QUANT_SIZES
    }


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((3, 5, 64)).astype(np.float32)
    stored = {
        "plain": (values, gguf.GGMLQuantizationType.F32),
        "vector": (values[0, 0], gguf.GGMLQuantizationType.F32),
        "half": (values.astype(np.float16), gguf.GGMLQuantizationType.F16),
        **{
            kind.name: (quantize(values, kind), kind)
            for kind in (gguf.GGMLQuantizationType[name] for name in ("BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"))
        },
    }
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_int16("a.i16", -30000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "größer 🥹")
    writer.add_array("a.words", ["x", "", "龜"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.flags", [True, False])
    writer.add_array("a.nested", [[1, 2], [3]])
    for name, (data, kind) in stored.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "a.u8": 200,
            "a.i8": -100,
            "a.i16": -30000,
            "a.u64": 2**63,
            "a.f32": 0.5,
            "a.f64": 0.1,
            "a.yes": True,
            "a.text": "größer 🥹",
            "a.words": ["x", "", "龜"],
            "a.numbers": [1, -2, 3],
            "a.flags": [True, False],
            "a.nested": [[1, 2], [3]],
        }
        assert list(file.tensors) == list(stored)
        for name, (data, kind) in stored.items():
            shape = (64,) if name == "vector" else (3, 5, 64)
            assert (file.tensors[name].shape, file.tensors[name].type_name) == (shape, kind.name)
            assert file.raw(name).tobytes() == data.tobytes()
            assert file.raw(name).shape[0] == (1 if name == "vector" else 15)
            result = file.dequantize(name)
            assert result.dtype == np.float32
            np.testing.assert_array_equal(result, dequantize(data, kind).reshape(shape))


def test_smollm2_is_read_as_the_gguf_package_reads_it(smollm2_gguf: GGUFFile) -> None:
    reader = gguf.GGUFReader(smollm2_gguf.path)
    assert {
        name: (info.type_name, info.shape, info.offset, info.nbytes)
        for name, info in smollm2_gguf.tensors.items()
    } == {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(int(dim) for dim in reversed(tensor.shape)),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(smollm2_gguf.metadata) == list(fields)
    for key, field in fields.items():
        ours = smollm2_gguf.metadata[key]
        if isinstance(ours, list):
            assert len(ours) == len(field.data)
            assert ours[:300] == field.contents(slice(300))
        else:
            assert ours == field.contents()
    for tensor in reader.tensors[1:20]:
        assert smollm2_gguf.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_raw_is_a_read_only_view_that_outlives_close(tmp_path: Path) -> None:
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", data=bytes(range(32))))
    view = file.raw("w")
    assert not view.flags.writeable
    file.close()
    assert view.tobytes() == bytes(range(32))
    with pytest.raises(ValueError, match="closed"):
        file.raw("w")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with (
        GGUFFile.open(write_gguf(tmp_path / "m.gguf")) as file,
        pytest.raises(CheckpointError, match=r"m\.gguf has no tensor 'nose'"),
    ):
        file.raw("nose")


def test_a_type_nobody_can_dequantise_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors=(Tensor(dims=(256,), kind=15),), data=bytes(320))
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModelError, match="Q8_K"):
        file.dequantize("w")


def test_alignment_is_honoured(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        metadata=(entry("general.alignment", UINT32, struct.pack("<I", 64)),),
        tensors=(Tensor("a"), Tensor("b", offset=64)),
        data=bytes(64) + b"\x01" * 32,
        alignment=64,
    )
    with GGUFFile.open(path) as file:
        assert file.tensors["a"].offset % 64 == 0
        assert file.raw("b").tobytes() == b"\x01" * 32


def nested_array(depth: int) -> bytes:
    value = array(UINT32, 1, bytes(4))
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return value


HOSTILE = {
    "bad magic": ({"magic": b"GGML"}, "begins with b'GGML'"),
    "version 1": ({"version": struct.pack("<I", 1)}, "version is 1"),
    "big-endian": ({"version": struct.pack(">I", 3)}, "big-endian"),
    "tensor count": ({"num_tensors": 2**60}, f"claims {2**60} tensors"),
    "metadata count": ({"num_metadata": 2**60}, f"claims {2**60} metadata entries"),
    "string length": (
        {"metadata": (entry("k", STRING, struct.pack("<Q", 2**62) + b"abc"),)},
        f"'k' at byte .* needs {2**62} bytes",
    ),
    "key length": ({"metadata": (struct.pack("<Q", 2**40),)}, "the limit is 65535"),
    "string array count": ({"metadata": (entry("k", ARRAY, array(STRING, 2**60)),)}, f"claims {2**60} elem"),
    "string array, plausible count": (
        {"metadata": (entry("k", ARRAY, array(STRING, 10**6)),)},
        "has room for at most",
    ),
    "string array, element too long": (
        {"metadata": (entry("k", ARRAY, array(STRING, 2, string("ok") + struct.pack("<Q", 2**63))),)},
        "string 1 of 'k' ends at byte",
    ),
    "number array count": ({"metadata": (entry("k", ARRAY, array(UINT32, 10**6)),)}, "needs 4000000 bytes"),
    "array of arrays count": ({"metadata": (entry("k", ARRAY, array(ARRAY, 10**6)),)}, "room for at most"),
    "nested too deep": ({"metadata": (entry("k", ARRAY, nested_array(5)),)}, "more than 4 deep"),
    "nested endlessly": ({"metadata": (entry("k", ARRAY, nested_array(5000)),)}, "more than 4 deep"),
    "value type": ({"metadata": (entry("k", 99, bytes(8)),)}, "unknown value type 99"),
    "boolean": ({"metadata": (entry("k", BOOL, b"\x02"),)}, "boolean of value 2"),
    "not UTF-8": ({"metadata": (entry("k", STRING, string(b"\xff")),)}, "'k' .* is not UTF-8"),
    "not UTF-8 in array": (
        {"metadata": (entry("k", ARRAY, array(STRING, 1, string(b"\xff"))),)},
        "string 0 of 'k' is not UTF-8",
    ),
    "duplicate key": ({"metadata": (entry("k", BOOL, b"\0"), entry("k", BOOL, b"\0"))}, "'k' appears twice"),
    "alignment 0": (
        {"metadata": (entry("general.alignment", UINT32, bytes(4)),)},
        "alignment is 0; it must be a power of two",
    ),
    "alignment 48": (
        {"metadata": (entry("general.alignment", UINT32, struct.pack("<I", 48)),)},
        "must be a power of two",
    ),
    "alignment is text": ({"metadata": (entry("general.alignment", STRING, string("32")),)}, "is '32'"),
    "n_dims 5": ({"tensors": (Tensor(dims=(1, 1, 1, 1, 1)),)}, "has 5 dimensions"),
    "n_dims 2**31": ({"tensors": (Tensor(n_dims=2**31),)}, "dimensions; 1 to 4"),
    "n_dims 0": ({"tensors": (Tensor(dims=()),)}, "has 0 dimensions"),
    "dims overflow": ({"tensors": (Tensor(dims=(2**32, 2**32)),)}, "impossible dimensions"),
    "dims of zero": ({"tensors": (Tensor(dims=(8, 0)),)}, "impossible dimensions"),
    "tensor type": ({"tensors": (Tensor(kind=4),)}, "unknown type 4"),
    "broken block": ({"tensors": (Tensor(dims=(48, 2), kind=Q8_0),)}, "rows of 48 elements"),
    "truncated": ({"tensors": (Tensor(dims=(8, 100)),)}, "truncated: tensor 'w' ends 3168 bytes beyond"),
    "offset beyond": ({"tensors": (Tensor(offset=2**63),)}, "truncated"),
    "overlap": ({"tensors": (Tensor("a", (16,)), Tensor("b", offset=32))}, "'a' and 'b' overlap"),
    "same place": ({"tensors": (Tensor("a"), Tensor("b"))}, "overlap"),
    "misaligned": ({"tensors": (Tensor(offset=4),)}, "offset 4, which is no multiple of 32"),
    "duplicate tensor": ({"tensors": (Tensor("a"), Tensor("a", offset=32))}, "'a' appears twice"),
}


@pytest.mark.parametrize(("contents", "problem"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused(tmp_path: Path, contents: dict[str, object], problem: str) -> None:
    path = write_gguf(tmp_path / "evil.gguf", **contents)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=problem) as raised:
        GGUFFile.open(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("contents", [b"", b"GG", b"GGUF", b"GGUF\x03\0\0\0\x01"])
def test_stubs_are_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "stub.gguf"
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"stub\.gguf"):
        GGUFFile.open(path)


@pytest.mark.parametrize("path", ["missing.gguf", "."])
def test_what_is_no_readable_file_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile.open(tmp_path / path)


def test_array_elements_are_limited_over_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(octavo_gguf, "MAX_ARRAY_ELEMENTS", 10)
    halves = [entry(key, ARRAY, array(BOOL, 6, bytes(6))) for key in "ab"]
    with GGUFFile.open(write_gguf(tmp_path / "one.gguf", metadata=(halves[0],))):
        pass
    with pytest.raises(CheckpointError, match="10 in all"):
        GGUFFile.open(write_gguf(tmp_path / "two.gguf", metadata=tuple(halves)))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_raise_nothing_but_checkpoint_errors(tmp_path: Path, data: st.DataObject) -> None:
    path = write_gguf(
        tmp_path / "fuzz.gguf",
        metadata=(
            entry("general.alignment", UINT32, struct.pack("<I", 32)),
            entry("words", ARRAY, array(STRING, 2, string("a") + string("bc"))),
            entry("nested", ARRAY, nested_array(2)),
            entry("size", UINT64, bytes(8)),
        ),
        tensors=(Tensor("a", (8, 2)), Tensor("b", (32,), Q8_0, 64)),
        data=bytes(98),
    )
    contents = bytearray(path.read_bytes())
    positions = st.integers(0, len(contents) - 1)
    for position, value in data.draw(st.lists(st.tuples(positions, st.integers(0, 255)), max_size=4)):
        contents[position] = value
    if data.draw(st.booleans()):
        del contents[data.draw(positions) :]
    path.write_bytes(contents)
    try:
        with GGUFFile.open(path) as file:
            for name in file.tensors:
                assert file.raw(name).nbytes == file.tensors[name].nbytes
    except CheckpointError:
        pass


@pytest.mark.parametrize(("kind", "name"), [(F32, "F32"), (Q8_0, "Q8_0")])
def test_a_stack_is_taken_apart_into_views(tmp_path: Path, kind: int, name: str) -> None:
    stack = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    raw = quantize(stack, gguf.GGMLQuantizationType[name])
    tensors = (Tensor("w", (64, 2, 3), kind), Tensor("v", (8,), F32, -(-raw.nbytes // 32) * 32))
    data = raw.tobytes() + bytes(-raw.nbytes % 32) + bytes(32)
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf", tensors=tensors, data=data)) as file:
        file.unstack(["w"])
        assert sorted(file.tensors) == ["v", "w[0]", "w[1]", "w[2]"]
        for index, matrix in enumerate(raw.view(np.uint8).reshape(3, 2, -1)):
            assert file.tensors[f"w[{index}]"].shape == (2, 64)
            assert file.tensors[f"w[{index}]"].type_name == name
            assert np.array_equal(file.raw(f"w[{index}]"), matrix)
            file.release(f"w[{index}]")


@pytest.mark.parametrize(
    "tensors",
    [
        (Tensor("w", (8,)),),
        (Tensor("w", (2, 2, 1, 2)),),
        (Tensor("w", (1, 2, 2)), Tensor("w[1]", (2,), F32, 32)),
        (Tensor("w", (1, 2, 4)),),  # one more than the test allows
    ],
)
def test_what_is_no_stack_is_refused(
    tmp_path: Path, tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(octavo_gguf, "MAX_UNSTACKED", 3)
    path = write_gguf(tmp_path / "x.gguf", tensors=tensors, data=bytes(64))
    with (
        GGUFFile.open(path) as file,
        pytest.raises(CheckpointError, match=r"'w' of shape .* more than 3"),
    ):
        file.unstack(["w"])
