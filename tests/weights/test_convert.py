"""Conversion of models: transformers and compressed-tensors read what is written, as the models it was."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.errors import CheckpointError, ConfigError, ModelLoadError, UnsupportedModelError
from octavo.quantization.pack_quantized import pack_rows
from octavo.weights import convert as conversion
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.convert import Report, convert
from octavo.weights.convert_gguf import open_gguf
from octavo.weights.convert_sources import Source, open_directory
from tiny_models import TinyModel, make_llama_directory

IDS = [[5, 80, 3, 200, 7, 7, 31]]


class Creates:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    """A tiny model as safetensors."""
    return make_llama_directory(tmp_path / "tiny", dtype="bfloat16")


def pickled(tiny: TinyModel, path: Path, *, shards: int = 1, legacy: bool = False) -> Path:
    """The same model as older versions of transformers wrote it, and files beside it."""
    path.mkdir()
    shutil.copy(tiny.path / "config.json", path)
    (path / "tokenizer.json").write_text('{"a": 1}')
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    for name in ("training_args.bin", "optimizer.pt", "README.md"):
        (path / name).write_bytes(b"no weights")
    (path / "LICENSE").write_text("free")
    values = load_file(tiny.path / "model.safetensors")
    names = list(values)
    weight_map = {}
    for shard in range(shards):
        file = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin"
        some = {name: values[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(some, file)
        torch.save(some, path / file, _use_new_zipfile_serialization=not legacy)
    if shards > 1:
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def convert_from(path: Path, out: Path, **options: Any) -> Report:
    return convert(open_directory(path), out, **options)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


def logits_of(path: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()
    with torch.no_grad():
        values: np.ndarray = model(torch.tensor(IDS)).logits.numpy()
    return values


# -- pickles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "legacy"), [(1, False), (3, False), (1, True)])
def test_pickles_become_the_same_tensors(tiny: TinyModel, tmp_path: Path, shards: int, legacy: bool) -> None:
    source = pickled(tiny, tmp_path / "pickled", shards=shards, legacy=legacy)
    out = tmp_path / "made" / "out"
    report = convert_from(source, out)
    assert_equal(loaded(out), loaded(tiny.path))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "LICENSE", "additional_chat_templates/rag.jinja", "config.json", "model.safetensors",
        "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert report.nbytes_before == sum(file.stat().st_size for file in source.glob("pytorch_model*.bin"))
    assert report.nbytes_after == (out / "model.safetensors").stat().st_size
    np.testing.assert_allclose(logits_of(out), tiny.logits(IDS), atol=1e-5)
    open_checkpoint(out).close()


def test_tied_heads_are_written_once(tmp_path: Path) -> None:
    tiny = make_llama_directory(tmp_path / "tiny", tie_word_embeddings=True)
    source = tmp_path / "pickled"
    source.mkdir()
    config = json.loads((tiny.path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    values = loaded(tiny.path)
    assert "lm_head.weight" not in values
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    torch.save(values, source / "pytorch_model.bin")
    convert_from(source, tmp_path / "out")
    assert "lm_head.weight" not in loaded(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    np.testing.assert_allclose(logits_of(tmp_path / "out"), tiny.logits(IDS), atol=1e-5)


def test_a_head_of_its_own_stays(tiny: TinyModel, tmp_path: Path) -> None:
    convert_from(pickled(tiny, tmp_path / "pickled"), tmp_path / "out")
    assert "lm_head.weight" in loaded(tmp_path / "out")


def test_views_and_other_dtypes_are_written_as_they_are(tiny: TinyModel, tmp_path: Path) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    base = torch.arange(24.0).reshape(4, 6)
    values = {
        "model.embed_tokens.weight": base.T,
        "model.layers.0.mlp.up_proj.weight": base[1:3, ::2],
        "three": torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        "number": torch.tensor(3, dtype=torch.int16),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros(0, 5),
        "f8": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "f64": torch.tensor([[1.5]], dtype=torch.float64),
    }
    torch.save(values, source / "pytorch_model.bin")
    convert_from(source, tmp_path / "out")
    read = loaded(tmp_path / "out")
    for name, value in values.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name].float(), value.float()), name


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_bug_S5_a_pickle_that_runs_code_is_refused_and_not_run(
    tiny: TinyModel, tmp_path: Path, name: str, legacy: bool
) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    values = {"model.embed_tokens.weight": torch.zeros(2, 2), "evil": Creates(tmp_path / "proof")}
    (source / "pytorch_model.bin").unlink()
    torch.save(values, source / name, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"is refused: it holds more than tensors.*mkdir"):
        convert_from(source, tmp_path / "out")
    assert not (tmp_path / "proof").exists()
    assert not (tmp_path / "out").exists()
    torch.load(source / name, weights_only=False)  # it would have
    assert (tmp_path / "proof").exists()


def test_bug_S5_a_bare_pickle_is_refused_and_not_run(tiny: TinyModel, tmp_path: Path) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Creates(tmp_path / "proof")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (is refused|can't be read)"):
        convert_from(source, tmp_path / "out")
    assert not (tmp_path / "proof").exists()


def test_damaged_pickles_are_errors_of_ours(tiny: TinyModel, tmp_path: Path) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    file = source / "pytorch_model.bin"
    data = file.read_bytes()
    for damaged in (b"", b"PK", data[:100], data[: len(data) // 2], b"x" * 1000, data[:-30]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            convert_from(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "no dictionary of tensors but a list"),
        ({"state": {"a": torch.zeros(2)}}, "no dictionary of tensors but a dict"),
        ({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, "called layers.0.attention.wq.weight"),
        ({"model.layers.0.x": torch.zeros(2, dtype=torch.complex128)}, "complex128"),
        ({"model.layers.0.x": torch.eye(2).to_sparse()}, "sparse"),
    ],
)
def test_what_is_no_model_is_refused(tiny: TinyModel, tmp_path: Path, content: Any, message: str) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    torch.save(content, source / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=message):
        convert_from(source, tmp_path / "out")


def test_several_pickles_need_an_index(tiny: TinyModel, tmp_path: Path) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    (source / "pytorch_model.bin").rename(source / "consolidated.00.pth")
    convert_from(source, tmp_path / "one")
    (source / "consolidated.01.pth").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"consolidated\.00\.pth, consolidated\.01\.pth and no"):
        convert_from(source, tmp_path / "out")
    for name in ("consolidated.00.pth", "consolidated.01.pth"):
        (source / name).unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        convert_from(source, tmp_path / "out")


@pytest.mark.parametrize(
    "shard", ["../evil.bin", "/etc/passwd", "a/b.bin", "evil.pkl", 3, ["x.bin"], "no-such.bin"]
)
def test_an_index_that_leads_elsewhere_is_refused(tiny: TinyModel, tmp_path: Path, shard: object) -> None:
    source = pickled(tiny, tmp_path / "pickled")
    index = {"weight_map": {"model.embed_tokens.weight": shard}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is no name of a .bin file beside it|no-such.bin is missing"):
        convert_from(source, tmp_path / "out")


# -- quantising ---------------------------------------------------------------------------------------


def is_quantised(name: str) -> bool:
    return "layers" in name and name.endswith("proj.weight")


@pytest.mark.parametrize(("quantization", "bits", "most"), [("int8", 8, 0.01), ("int4", 4, 0.12)])
def test_matrices_of_layers_are_quantised_and_nothing_else(
    tiny: TinyModel, tmp_path: Path, quantization: str, bits: int, most: float
) -> None:
    out = tmp_path / "out"
    report = convert_from(tiny.path, out, quantization=quantization)
    before, after = loaded(tiny.path), loaded(out)
    quantised = {name for name in before if is_quantised(name)}
    assert report.errors.keys() == quantised
    assert all(0 < error < most for error in report.errors.values())
    kept = {name: value for name, value in before.items() if name not in quantised}
    assert_equal({name: after[name] for name in kept}, kept)
    assert after.keys() - kept.keys() == {
        f"{n}_{part}" for n in quantised for part in ("packed", "scale", "shape")
    }
    for name in quantised:
        expected = pack_rows(before[name].float().numpy(), bits)
        np.testing.assert_array_equal(after[f"{name}_packed"].numpy(), expected.packed)
        np.testing.assert_array_equal(after[f"{name}_scale"].numpy(), expected.scale)
        assert after[f"{name}_shape"].tolist() == list(before[name].shape)
        assert report.errors[name] == pytest.approx((expected.squared_error / expected.squared_norm) ** 0.5)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert report.nbytes_after < report.nbytes_before
    checkpoint = open_checkpoint(out)  # our own reader finds the errors that the report says
    for name in quantised:
        exact = before[name].float().numpy()
        read = checkpoint.rows(name, exact.shape).dequantize()
        error = np.linalg.norm(read - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(report.errors[name], rel=1e-4)
    checkpoint.close()


def test_pieces_make_no_difference(tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_from(tiny.path, tmp_path / "whole", quantization="int4", dtype="float16")
    monkeypatch.setattr(conversion, "_PIECE_WEIGHTS", 200)
    convert_from(tiny.path, tmp_path / "pieces", quantization="int4", dtype="float16", max_shard_bytes=30_000)
    assert len(list((tmp_path / "pieces").glob("*.safetensors"))) > 2
    assert_equal(loaded(tmp_path / "whole"), loaded(tmp_path / "pieces"))


def test_an_index_that_differs_from_its_files_is_refused(tmp_path: Path) -> None:
    tiny = make_llama_directory(tmp_path / "tiny", max_shard_size="50KB")
    convert_from(tiny.path, tmp_path / "sound", dtype="float16")
    file = tiny.path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="do not list the same tensors"):
        convert_from(tiny.path, tmp_path / "out", dtype="float16")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_transformers_runs_it_through_compressed_tensors(
    tiny: TinyModel, tmp_path: Path, quantization: str
) -> None:
    pytest.importorskip("compressed_tensors", reason="the library of the layout is not installed")
    out = tmp_path / "out"
    report = convert_from(tiny.path, out, quantization=quantization)
    quantised, exact = logits_of(out), tiny.logits(IDS)
    error = np.linalg.norm(quantised - exact) / np.linalg.norm(exact)
    worst = max(report.errors.values())
    assert worst / 10 < error < 10 * worst  # of the size of the weights' own: quantised, and rightly


def test_routers_keep_their_precision_and_are_ignored_by_name(tmp_path: Path) -> None:
    names = ["block_sparse_moe.gate", "block_sparse_moe.experts.0.w1", "mlp.gate", "mlp.experts.3.down_proj"]
    tensors = [FakeTensor(f"model.layers.0.{name}.weight", np.ones((4, 64), np.float32)) for name in names]
    tensors.append(FakeTensor("model.layers.0.mlp.up_proj.weight", np.ones((4, 48), np.float32)))
    source = Source(path=tmp_path / "m", config={}, tensors=tensors, files={}, nbytes=1)
    report = convert(source, tmp_path / "out", quantization="int8")
    assert report.errors.keys() == {tensors[1].name, tensors[3].name}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == [
        "lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate",
        "model.layers.0.mlp.up_proj",
    ]  # fmt: skip
    assert config["torch_dtype"] == "float32"


@dataclasses.dataclass(frozen=True)
class FakeTensor:
    """A tensor in memory."""

    name: str
    values: np.ndarray
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def kept_as(self) -> str:
        return self.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = self.values.reshape(-1, self.values.shape[-1] if self.values.ndim else 1)
        return np.ascontiguousarray(rows[start:stop]).view(np.uint8)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        values = np.random.default_rng(0).normal(size=(rows, 1024)).astype(np.float32)
        tensor = FakeTensor("model.layers.0.mlp.up_proj.weight", values)
        source = Source(path=tmp_path / "m", config={}, tensors=[tensor], files={}, nbytes=1)
        tracemalloc.start()
        try:
            convert(source, tmp_path / f"out-{rows}", quantization="int4")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(1024), peak(8192)
    assert large < small + (1 << 20) < 40 << 20


# -- dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_dtypes_are_cast_as_torch_does(tmp_path: Path, stored: str, dtype: str) -> None:
    tiny = make_llama_directory(tmp_path / "tiny", dtype=stored)
    convert_from(tiny.path, tmp_path / "out", dtype=dtype)
    expected = {name: value.to(getattr(torch, dtype)) for name, value in loaded(tiny.path).items()}
    assert_equal(loaded(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == dtype


@pytest.mark.parametrize(("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, dtype: str, value: float) -> None:
    values = np.array([[1.0, np.inf, np.nan, value]], np.float32)
    source = Source(path=tmp_path / "m", config={}, tensors=[FakeTensor("t", values)], files={}, nbytes=1)
    with pytest.raises(CheckpointError, match=rf"tensor 't' can't be converted: .*which {dtype} can't hold"):
        convert(source, tmp_path / "out", dtype=dtype)
    fits = dataclasses.replace(source, tensors=[FakeTensor("t", values[:, :3])])
    convert(fits, tmp_path / "out", dtype=dtype)
    read = loaded(tmp_path / "out")["t"].float()
    assert read[0, 0] == 1
    assert read[0, 1] == float("inf")
    assert read[0, 2].isnan()


# -- what is refused ----------------------------------------------------------------------------------


def test_nothing_is_replaced_and_nothing_is_left_behind(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there is there already, and nothing is replaced"):
        convert_from(tiny.path, tmp_path / "there", dtype="float16")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "_write_files", fail)
    with pytest.raises(ModelLoadError, match=r"could not be written: .*No space left"):
        convert_from(tiny.path, tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "tiny"]


def test_what_would_change_nothing_is_refused(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in safetensors already; say what to change"):
        convert_from(tiny.path, tmp_path / "out")
    with pytest.raises(ConfigError, match="--quantization is 'int3'; it must be one of none, int4, int8"):
        convert_from(tiny.path, tmp_path / "out", quantization="int3")
    with pytest.raises(ConfigError, match="--dtype is 'f16'; it must be one of auto, float16"):
        convert_from(tiny.path, tmp_path / "out", dtype="f16")
    source = open_directory(tiny.path)
    again = dataclasses.replace(
        source, config=source.config | {"quantization_config": {"quant_method": "gptq"}}
    )
    for options in ({"quantization": "int4"}, {"dtype": "float16"}):
        with pytest.raises(UnsupportedModelError, match="is quantised already"):
            convert(again, tmp_path / "out", **options)
    nothing = dataclasses.replace(source, tensors=[t for t in source.tensors if not is_quantised(t.name)])
    with pytest.raises(UnsupportedModelError, match="has no matrix that would be quantised"):
        convert(nothing, tmp_path / "out", quantization="int4")


def test_a_full_disk_is_seen_before_anything_is_written(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: copy.copy(usage)._replace(free=1000))
    with pytest.raises(ModelLoadError, match=r"needs 0.00 GB more under .*free some space"):
        convert_from(tiny.path, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


# -- GGUF ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StubRows:
    """A stored tensor: F32, its rows in another order."""

    raw: np.ndarray
    row_order: np.ndarray | None = None
    type_name: str = "F32"


class StubCheckpoint:
    """What `open_gguf` asks of a GGUF file's checkpoint."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def rows(self, name: str, shape: tuple[int, ...]) -> StubRows:
        return StubRows(self.tensors[name].reshape(-1, shape[-1]).view(np.uint8))


def gguf_source(tmp_path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Source:
    (tmp_path / "x.gguf").touch()
    sizes = {"head_dim": 16, "rotary_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    checkpoint: Any = StubCheckpoint(tmp_path / "x.gguf", sizes | config, tensors)
    return open_gguf(checkpoint, list(tensors), {"tokenizer.json": "{}"}, bos_id=1, eos_ids=(2, 3))


def test_norms_that_hold_their_1_are_written_without_it(tmp_path: Path) -> None:
    values = {
        "model.norm.weight": np.array([1.5, 0.5], np.float32),
        "lm_head.weight": np.ones((2, 2), np.float32),
    }
    local = {"rope_type": "default", "rope_theta": 1e4}
    far = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    rope = {"full_attention": far, "sliding_attention": local}
    source = gguf_source(tmp_path, values, model_type="gemma3_text", norm_offset=0.0, rope_parameters=rope)
    convert(source, tmp_path / "out")
    read = loaded(tmp_path / "out")
    assert read["model.norm.weight"].tolist() == [0.5, -0.5]
    assert read["lm_head.weight"].tolist() == [[1, 1], [1, 1]]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "rope_parameters": rope,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "torch_dtype": "float32",
    }


def test_a_part_that_is_rotated_is_said(tmp_path: Path) -> None:
    config = gguf_source(tmp_path, {}, model_type="phi3", rotary_dim=12).config
    assert config["partial_rotary_factor"] == config["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert "rotary_dim" not in config


def test_families_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"x\.gguf: 'starcoder' models are not converted from GGUF"
    ):
        gguf_source(tmp_path, {}, model_type="starcoder")
