"""gpt-oss directories: stacked experts, plain and in MXFP4, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from families import VOCAB, make_model
from octavo import ModelRunner
from octavo.config.resolve import resolve
from octavo.errors import CheckpointError, OctavoError
from octavo.weights.checkpoint import open_checkpoint

EXPERTS = "model.layers.1.mlp.experts"
Tensors = dict[str, torch.Tensor]


def saved(tmp_path: Path) -> tuple[Any, Path]:
    model = make_model("gpt-oss")
    model.save_pretrained(tmp_path)
    return model, tmp_path / "model.safetensors"


def pack(path: Path, model: Any) -> None:
    """Make the experts random MXFP4 blocks, in the file and, dequantised by transformers, in the model."""
    tensors = load_file(path)
    random: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.uint8}
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), **random)
        scales = torch.randint(121, 126, (experts, rows, width // 32), **random)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path)
    config = json.loads((path.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path.parent / "config.json").write_text(json.dumps(config))


def test_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    pack(path, model)
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    for e in range(6):
        gate_up, down = expected[f"{EXPERTS}.gate_up_proj"][e].T, expected[f"{EXPERTS}.down_proj"][e].T
        for name, values in (("gate_proj", gate_up[::2]), ("up_proj", gate_up[1::2]), ("down_proj", down)):
            rows = checkpoint.rows(f"{EXPERTS}.{e}.{name}.weight", tuple(values.shape))
            assert rows.type_name == "MXFP4"
            assert np.array_equal(rows.dequantize(), values.numpy())


def test_logits_are_those_of_the_dequantised_model(tmp_path: Path) -> None:
    model, path = saved(tmp_path)
    pack(path, model)
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 40)).tolist()
    with torch.inference_mode():
        expected = model.double()(torch.tensor(ids)).logits.numpy()
    runner = ModelRunner(tmp_path, resolve({"backend": "torch", "max_model_len": 64}).config)
    assert not any("rounded" in note for note in runner.checkpoint.notes)
    assert np.abs(runner.predict(ids) - expected).max() < 1e-4 * np.abs(expected).max()


def without(name: str) -> Any:
    def spoil(tensors: Tensors) -> None:
        del tensors[name]

    return spoil


def reshaped(name: str, *shape: int) -> Any:
    def spoil(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without(f"{EXPERTS}.gate_up_proj_bias"), "down_proj_bias' comes without .*gate_up_proj_bias"),
        (without(f"{EXPERTS}.gate_up_proj"), "gate_up_proj_bias' comes without .*gate_up_proj'"),
        (
            without(f"{EXPERTS}.down_proj_bias"),
            "not served with|is missing",
        ),
        (reshaped(f"{EXPERTS}.down_proj_bias", 6), r"down_proj_bias' has shape \(6,\); it must be \[experts"),
        (reshaped(f"{EXPERTS}.gate_up_proj_bias", 6, 191), r"has shape \(6, 191\); it must be"),
        (reshaped(f"{EXPERTS}.gate_up_proj", 6, 64, 190), r"its bias makes it \[6, \*, 192\]"),
        (reshaped(f"{EXPERTS}.down_proj", 5, 96, 64), r"its bias makes it \[6, \*, 64\]"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    _, path = saved(tmp_path)
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(OctavoError, match=message):
        ModelRunner(tmp_path, resolve({"backend": "torch"}).config)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj_blocks", (6, 192, 2, 15), r"has shape .*; its bias makes it \[6, 192, \*, 16\]"),
        ("down_proj_scales", (6, 64, 2), r"has shape .*; what it belongs to makes it \(6, 64, 3\)"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    model, path = saved(tmp_path)
    pack(path, model)
    tensors = load_file(path)
    tensors[f"{EXPERTS}.{name}"] = torch.zeros(shape, dtype=torch.uint8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_another_activation_is_refused(tmp_path: Path, key: str, value: float) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(OctavoError, match=f"{key} {value} is not served"):
        ModelRunner(tmp_path, resolve({"backend": "torch"}).config)
