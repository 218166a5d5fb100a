"""Directories in Hugging Face's layout: what transformers writes is read as it was meant, or refused."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from families import make_model
from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.errors import CheckpointError, ModelLoadError, UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.quantization.formats import Format
from octavo.runner.model_runner import ModelRunner
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hf_config import normalised
from octavo.weights.model_directory import INDEX
from octavo.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tiny_models import TinyModel, make_llama_directory

SINGLE = "model.safetensors"
V = "model.layers.0.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_llama_directory(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    tiny = make_llama_directory(tmp_path_factory.mktemp("sharded"), max_shard_size="100KB")
    assert len(list(tiny.path.glob("model-*.safetensors"))) > 2
    return tiny


@pytest.fixture
def copy(single: TinyModel, sharded: TinyModel, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a directory that a test may damage."""

    def make(which: str) -> Path:
        target = tmp_path / which
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree({"single": single, "sharded": sharded}[which].path, target)
        return target

    return make


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# -- logits -----------------------------------------------------------------------------------------


def assert_logits(tiny: TinyModel, backend: str) -> None:
    """Within float32's rounding on torch (a bound of tests/models/test_llama.py, with all constants
    rounded up: 20 reductions of 130 terms); natively KV is f16, with half the mantissa."""
    ids = np.random.default_rng(1).integers(0, 262, (2, 40)).tolist()
    expected = tiny.logits(ids)
    runner = ModelRunner(tiny.path, resolve({"backend": backend, "threads": 2}).config)
    found = runner.predict(ids)
    runner.close()
    tolerance = (20 * 130 + 40 * 13) * 2.0**-24 + (0 if backend == "torch" else 4 * 2.0**-11)
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    assert expected.std() > 0.5


BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not library.available(), reason="unbuilt")),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_are_those_of_transformers(tmp_path: Path, backend: str, dtype: str, tied: bool) -> None:
    tiny = make_llama_directory(
        tmp_path,
        dtype=dtype,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        vocab_size=303,
    )
    assert_logits(tiny, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards(sharded: TinyModel, backend: str) -> None:
    assert_logits(sharded, backend)


def test_what_a_checkpoint_says(single: TinyModel) -> None:
    checkpoint = open_checkpoint(single.path)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert (checkpoint.architecture, checkpoint.metadata, checkpoint.notes) == ("llama", {}, [])
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.config["rope_parameters"]["rope_theta"] == 10000.0
    assert checkpoint.config["rope_parameters"]["rope_type"] == "default"
    assert checkpoint.config["rotary_dim"] == checkpoint.config["head_dim"] == 16
    assert checkpoint.generation_config["eos_token_id"] == single.model.config.eos_token_id
    assert checkpoint.shape(V) == (32, 64)
    assert checkpoint.has(V)
    assert not checkpoint.has("model.layers.9.self_attn.v_proj.weight")
    assert checkpoint.format_of((V,)) is Format.F32
    found = checkpoint.rows(V, (999, 64))
    assert np.array_equal(found.dequantize(), single.model.state_dict()[V].float().numpy())
    assert found.row_order is None
    checkpoint.close()
    with pytest.raises(ValueError, match="was closed"):
        _ = found.raw


# -- config.json ------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 50,
    "rms_norm_eps": 1e-5,
}


def config(**overrides: Any) -> dict[str, Any]:
    return normalised(CONFIG | overrides, Path("m/config.json"), has_head=False)


def test_what_config_leaves_out_has_defaults() -> None:
    found = config(head_dim=None, rope_scaling=None)
    derived = {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        "tie_word_embeddings": True,
    }
    assert found == CONFIG | {"rope_scaling": None} | derived


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_rope_in_every_spelling(overrides: dict[str, Any]) -> None:
    found = config(**overrides)
    assert found["rope_parameters"]["rope_theta"] == 5e5
    assert found["rope_parameters"]["rope_type"] == "linear"
    assert found["rope_parameters"]["factor"] == 2.0


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ],
)
def test_rope_that_differs_between_layers(overrides: dict[str, Any]) -> None:
    kinds = config(**overrides)["rope_parameters"]
    full, local = kinds["full_attention"], kinds["sliding_attention"]
    assert (full["rope_type"], full["rope_theta"], full["factor"]) == ("linear", 1e6, 8.0)
    assert (local["rope_type"], local["rope_theta"]) == ("default", 1e4)


def test_partial_rotation() -> None:
    assert config(partial_rotary_factor=0.5)["rotary_dim"] == 8
    assert config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})["rotary_dim"] == 4


@pytest.mark.parametrize("key", CONFIG)
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"m/config\.json: {key} is missing"):
        config(**{key: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("vocab_size", 2**31),
        ("head_dim", -1),
        ("num_key_value_heads", "2"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
        ("rope_theta", float("inf")),
        ("rope_theta", [1e4]),
        ("rope_scaling", "linear"),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", 1),
        ("partial_rotary_factor", 0),
    ],
)
def test_impossible_values_are_named(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"m/config\.json: {key} is .* makes sense"):
        config(**{key: value})


# -- directories that are not what they claim ---------------------------------------------------------


def assert_refused(path: Path, error: type[ModelLoadError], message: str) -> None:
    with pytest.raises(error, match=message):
        ModelRunner(path, resolve({"backend": "torch"}).config)


def test_bug_S5_pickles_are_never_opened(copy: Callable[[str], Path]) -> None:
    path = copy("single")
    (path / SINGLE).unlink()
    assert_refused(path, CheckpointError, r"neither model\.safetensors nor model\.safetensors\.index\.json")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps({"weights": 1}))
    assert_refused(
        path, UnsupportedModelError, r"_model\.bin only.*can run code.*make safetensors.*octavo convert"
    )


def test_a_damaged_config(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy("single")
    for text in ("", "{", "[1]", '{"model_type": 3}', "[" * 100_000, '{"a": 1, "a": 2}', "\x00"):
        (path / "config.json").write_text(text)
        assert_refused(path, CheckpointError, r"config\.json")
    (path / "config.json").write_text(" " * (5 << 20))
    assert_refused(path, CheckpointError, r"config\.json is longer than")
    path = copy("single")
    (path / "generation_config.json").write_text("no")
    assert_refused(path, CheckpointError, r"generation_config\.json can't be read")


def test_a_family_is_refused_before_its_config_is_read(copy: Callable[[str], Path]) -> None:
    path = copy("single")
    edit(path / "config.json", lambda value: value.update(model_type="mamba", hidden_size=None))
    assert_refused(path, UnsupportedModelError, "architecture 'mamba' is not served")


def test_bug_43_the_index_is_an_allow_list(copy: Callable[[str], Path]) -> None:
    path = copy("sharded")
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    shard = weight_map[V]
    other = next(name for name in weight_map.values() if name != shard)

    (path / shard).unlink()
    assert_refused(path, CheckpointError, rf"{shard} is missing")

    path = copy("sharded")
    edit(path / INDEX, lambda value: value["weight_map"].pop(V))
    assert_refused(path, CheckpointError, rf"{shard} holds tensors that .* does not list there: {V}")

    path = copy("sharded")
    edit(path / INDEX, lambda value: value["weight_map"].update({V: other}))
    assert_refused(
        path, CheckpointError, rf"{shard} holds tensors that .* does not list there: {V}|lacks tensor '{V}'"
    )

    path = copy("sharded")
    edit(path / INDEX, lambda value: value["weight_map"].update(extra=shard))
    assert_refused(path, CheckpointError, rf"{shard} lacks tensor 'extra'")

    path = copy("sharded")
    data = (path / shard).read_bytes()
    (path / shard).write_bytes(data[:-10])
    assert_refused(path, CheckpointError, rf"{shard}: .*truncated")

    path = copy("sharded")
    for bad in ("../" + shard, "/etc/passwd", "a/b.safetensors", "..", 3, None, "x.bin", "a\0.safetensors"):
        edit(path / INDEX, lambda value, bad=bad: value["weight_map"].update({V: bad}))  # type: ignore[misc]
        assert_refused(path, CheckpointError, r"index\.json: .* is not the name of a safetensors file")
    for value in ({}, {"weight_map": []}, {"weight_map": {}}):
        (path / INDEX).write_text(json.dumps(value))
        assert_refused(path, CheckpointError, r"index\.json: it has no weight_map")


def test_tensors_of_the_wrong_kind(copy: Callable[[str], Path]) -> None:
    path = copy("single")
    tensors = load_file(path / SINGLE)
    for dtype in (np.float64, np.int32):
        (path / SINGLE).unlink()
        save_file(tensors | {V: tensors[V].astype(dtype)}, path / SINGLE)
        kind = "F64" if dtype is np.float64 else "I32"
        assert_refused(path, UnsupportedModelError, rf"'{V}' is {kind}, which no weight is computed with")
    (path / SINGLE).unlink()
    save_file(tensors | {V: tensors[V][:, :32].copy()}, path / SINGLE)
    assert_refused(path, CheckpointError, rf"'{V}' has shape \(32, 32\)")
    (path / SINGLE).unlink()
    save_file({name: values for name, values in tensors.items() if name != V}, path / SINGLE)
    assert_refused(path, CheckpointError, rf"tensor '{V}' is missing")
    (path / SINGLE).unlink()
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, path / SINGLE)
    assert_refused(path, UnsupportedModelError, r"not served with: model\.layers\.0\.self_attn\.q_proj\.bias")


def test_what_models_compute_anew_may_be_there(tmp_path: Path) -> None:
    tiny = make_llama_directory(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tiny.path / SINGLE)
    (tiny.path / SINGLE).unlink()
    kept = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    save_file(tensors | kept, tiny.path / SINGLE)
    assert_logits(tiny, "torch")


def test_damaged_indices_raise_nothing_but_checkpoint_errors(copy: Callable[[str], Path]) -> None:
    path = copy("sharded")
    good = (path / INDEX).read_bytes()
    rng = random.Random(0)
    messages = []
    for index in range(240):
        data = bytearray(good)
        if index % 3 == 0:
            del data[rng.randrange(len(data)) :]
        elif index % 3 == 1:
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        else:
            begin = rng.randrange(len(data))
            del data[begin : begin + rng.randint(1, 80)]
        (path / INDEX).write_bytes(bytes(data))
        try:
            open_checkpoint(path).close()
        except (CheckpointError, UnsupportedModelError) as error:
            messages.append(str(error))
    assert len(messages) > 200
    assert all(str(path) in message and len(message) < 1500 for message in messages)


def test_widening_is_exact_for_every_bit_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    raw = bits.view(np.uint8).reshape(256, -1)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        expected = torch.from_numpy(bits.view(np.int16).copy()).view(dtype).float().numpy()
        np.testing.assert_array_equal(dequantize(raw, name).reshape(-1), expected)


def test_experts_are_counted_under_either_name(tmp_path: Path) -> None:
    """Version 4 of transformers wrote num_experts for Qwen3-MoE, version 5 num_local_experts."""
    model = make_model("qwen3 moe")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    count = config.pop("num_local_experts", None) or config.pop("num_experts")
    for key in ("num_experts", "num_local_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: count}))
        assert open_checkpoint(tmp_path).config["num_local_experts"] == count == 6
