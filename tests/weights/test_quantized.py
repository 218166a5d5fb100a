"""Quantised directories of any kind: what nobody serves, and what can't be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packers import (
    Array,
    Tensors,
    assert_refused,
    awq,
    edit_config,
    gptq,
    groups,
    pack_quantized,
    predict,
    quantize,
    quantize_directory,
    rewrite,
)

from octavo.errors import CheckpointError, UnsupportedModelError
from tiny_models import TinyModel, make_llama_directory

Change = Callable[[torch.Tensor], torch.Tensor]
UP = "model.layers.0.mlp.up_proj"
ARGS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32},
    "fp8": {"quant_method": "fp8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": ARGS}, "b": {"weights": FLOATS}},
    },
}


def pack(method: str) -> Callable[[str, Array], tuple[Tensors, Array]]:
    def packed(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, 4, groups(weight.shape[1], 32), symmetric=False)
        if method in ("gptq", "awq"):
            return gptq(name, w) if method == "gptq" else awq(name, w), w.values
        if method == "compressed-tensors" and "up_proj" in name:
            return pack_quantized(name, w, torch.float16, symmetric=False), w.values
        quants = torch.from_numpy(weight).to(torch.float8_e4m3fn)
        scales = torch.ones(len(weight), 1)
        return {f"{name}.weight": quants, f"{name}.weight_scale": scales}, quants.double().numpy()

    return packed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    return {
        method: quantize_directory(tmp_path_factory.mktemp(method), config, pack(method), num_hidden_layers=1)
        for method, config in CONFIGS.items()
    }


@pytest.mark.parametrize("method", CONFIGS)
def test_no_damage_to_a_part_raises_anything_else(
    packed: dict[str, TinyModel], tmp_path: Path, method: str
) -> None:
    """Whatever a part becomes, the model loads or is refused by the file's name."""
    messages = []
    for part in PARTS:
        for change in CHANGES:
            path = Path(shutil.copytree(packed[method].path, tmp_path / "copy", dirs_exist_ok=True))
            if not damage(path, f"{UP}.{part}", change):
                break  # no part of this method's
            try:
                predict(path, [[1, 2]])
            except (CheckpointError, UnsupportedModelError) as error:
                messages.append(str(error))
    assert len(messages) > 15
    assert all("copy" in message and len(message) < 1000 for message in messages)


PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point"),
)
CHANGES: tuple[Change, ...] = (
    lambda t: t[:0],
    lambda t: t[..., :0],
    lambda t: t.reshape(-1),
    lambda t: t[None],
    lambda t: t.flatten()[0],
    lambda t: torch.cat([t, t]),
    lambda t: t[:1],
    lambda t: t.view(torch.uint8) if t.element_size() == 1 else t.int(),
    lambda t: t.to(torch.float64),
    lambda t: t.to(torch.bool),
    lambda t: torch.full_like(t.float(), -1e30).to(t.dtype),
    lambda t: torch.full_like(t.float(), float("nan")).to(t.dtype),
)


def damage(path: Path, name: str, change: Change) -> bool:
    """Change a tensor; whether there is one."""
    found = []

    def at_name(tensors: Tensors) -> None:
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()
            found.append(name)

    rewrite(path, at_name)
    return bool(found)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "mxfp4", "quark", "eetq", "auto-round", None, 3])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: object) -> None:
    path = make_llama_directory(tmp_path, num_hidden_layers=1).path
    edit_config(path, quantization_config={"quant_method": method, "bits": 4})
    assert_refused(
        path,
        UnsupportedModelError,
        rf"config\.json: the weights are quantised by '{method}'.* awq, fp8, compressed-tensors\. .*GGUF",
    )
    edit_config(path, quantization_config="int4")
    assert_refused(path, UnsupportedModelError, "quantised by 'int4'")


def test_a_config_that_nothing_is_packed_by(tmp_path: Path) -> None:
    """Somebody dequantised the model and left the key: the weights are what they are."""
    tiny = make_llama_directory(tmp_path)
    before = predict(tiny.path, [[1, 2, 3]])
    for config in CONFIGS.values():
        edit_config(tiny.path, quantization_config=config)
        assert (predict(tiny.path, [[1, 2, 3]]) == before).all()
