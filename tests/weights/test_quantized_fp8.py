"""Directories of FP8 weights, against torch's own FP8 and `transformers` with the weights in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packers import (
    Array,
    Tensors,
    assert_logits,
    assert_refused,
    edit_config,
    held,
    matrices,
    predict,
    quantize_directory,
    rewrite,
)

from octavo.errors import CheckpointError, UnsupportedModelError
from tiny_models import TinyModel

UP = "model.layers.0.mlp.up_proj"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def fp8_packer(
    cell: tuple[int | None, int | None],
    *,
    suffix: str = "weight_scale",
    dtype: torch.dtype = E4M3,
    scale_dtype: torch.dtype = torch.float32,
    shape: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales,
    powers: bool = False,
) -> Callable[[str, Array], tuple[Tensors, Array]]:
    """cell: rows and columns that share a scale, None for all."""

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = torch.from_numpy(weight)
        rows, columns = cell[0] or w.shape[0], cell[1] or w.shape[1]
        down, across = range(0, w.shape[0], rows), range(0, w.shape[1], columns)
        scales, quants = torch.empty(len(down), len(across)), torch.empty(w.shape, dtype=dtype)
        values = torch.empty(w.shape, dtype=torch.float64)
        for i, top in enumerate(down):
            for j, left in enumerate(across):
                here = slice(top, top + rows), slice(left, left + columns)
                scale = w[here].abs().max() / LARGEST[dtype]
                scale = torch.exp2(torch.log2(scale).ceil()) if powers else scale.to(scale_dtype).float()
                scales[i, j] = scale
                quants[here] = (w[here] / scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
                values[here] = quants[here].double() * scale.double()
        stored = scales.to(scale_dtype)
        return {f"{name}.weight": quants, f"{name}.{suffix}": shape(stored).contiguous()}, values.numpy()

    return pack


def fp8(**values: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | values


def assert_bf16(tiny: TinyModel, how: str, exact: bool = False) -> None:
    """Values are torch's rounding of the float64 products."""
    types, values, notes = held(tiny)
    assert types == {"BF16"}
    assert notes[0].endswith(f"7 as {how}")
    for name, wanted in matrices(tiny).items():
        rounded = wanted if exact else torch.from_numpy(wanted).bfloat16().double().numpy()
        np.testing.assert_array_equal(values[name], rounded)
        assert (np.abs(values[name] - wanted) <= 2.0**-8 * np.abs(wanted)).all()
    assert_logits(tiny)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("cell", "shape"),
    [
        ((None, None), lambda scales: scales.reshape(())),
        ((None, None), lambda scales: scales.reshape(1)),
        ((1, None), lambda scales: scales),
        ((1, None), lambda scales: scales.reshape(-1)),
    ],
    ids=["scalar", "tensor", "channel", "flat channel"],
)
def test_scales_of_tensors_and_channels(tmp_path: Path, cell: Any, shape: Any, dtype: torch.dtype) -> None:
    packer = fp8_packer(cell, shape=shape, dtype=dtype)
    assert_bf16(quantize_directory(tmp_path, fp8(), packer, num_hidden_layers=1), "bf16, rounded to nearest")


@pytest.mark.parametrize("block", [(128, 128), (48, 80)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_blocks_with_ragged_ends(tmp_path: Path, block: tuple[int, int], scale_dtype: torch.dtype) -> None:
    tiny = quantize_directory(
        tmp_path,
        fp8(weight_block_size=list(block), fmt="e4m3"),
        fp8_packer(block, suffix="weight_scale_inv", scale_dtype=scale_dtype),
        hidden_size=192,
        intermediate_size=320,
        num_attention_heads=6,
        head_dim=32,
        num_hidden_layers=1,
    )
    assert_bf16(tiny, "bf16, rounded to nearest")
    _, _, notes = held(tiny)
    assert f"FP8 in blocks of {block[0]}x{block[1]}" in notes[0]
    assert notes[1].endswith("quantization_config is for activations too; they are not quantised so")


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_scales_that_are_powers_of_two_round_nothing(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    packer = fp8_packer((32, 32), suffix="weight_scale_inv", scale_dtype=scale_dtype, powers=True)
    config = fp8(weight_block_size=[32, 32], scale_fmt="ue8m0")
    assert_bf16(quantize_directory(tmp_path, config, packer, num_hidden_layers=1), "bf16 exactly", exact=True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_is_torchs(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = torch.where(codes.isfinite(), codes, 0).to(dtype)

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        quants = codes.repeat(weight.size // 256).reshape(weight.shape)
        return {
            f"{name}.weight": quants,
            f"{name}.weight_scale": torch.tensor(2.0**-6),
        }, quants.double() * 2.0**-6

    tiny = quantize_directory(tmp_path, fp8(), pack, num_hidden_layers=1)
    for name, wanted in matrices(tiny).items():
        np.testing.assert_array_equal(held(tiny)[1][name], wanted)


def test_scales_of_activations_and_kv_are_not_applied_and_said(tmp_path: Path) -> None:
    packer = fp8_packer((None, None), shape=lambda scales: scales.reshape(()))

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, values = packer(name, weight)
        return tensors | {f"{name}.input_scale": torch.tensor(0.5)}, values

    tiny = quantize_directory(tmp_path, fp8(activation_scheme="static"), pack, num_hidden_layers=1)
    assert_logits(tiny)
    kv = {f"model.layers.0.self_attn.{name}_scale": torch.tensor(0.5) for name in "kv"}
    rewrite(tmp_path, lambda tensors: tensors.update(kv))
    assert_logits(tiny)
    assert held(tiny)[2][1] == (
        f"{tmp_path.name}: its quantization_config is for activations and the KV cache too; "
        "they are not quantised so"
    )
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.r_scale": torch.tensor(0.5)}))
    assert_refused(tmp_path, UnsupportedModelError, r"not served with: model\.layers\.0\.self_attn\.r_scale$")


# -- refused --------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    packer = fp8_packer((32, 32), suffix="weight_scale_inv")
    return quantize_directory(tmp_path, fp8(weight_block_size=[32, 32]), packer, num_hidden_layers=1).path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_scheme", "online"),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
        ("weight_block_size", [128, 10**20]),
        ("weight_block_size", "128x128"),
    ],
)
def test_what_configs_may_not_say(packed: Path, key: str, value: object) -> None:
    edit_config(packed, quantization_config=fp8(**{key: value}))
    message = rf"quantization_config\.{key} is '{re.escape(str(value))}'; served are"
    assert_refused(packed, UnsupportedModelError, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:1], r"has shape \(1, 2\); it must be \[1, 1\] or \[128, 1\] or \[4, 2\]"),
        (lambda t: t[None], r"has shape \(1, 4, 2\); it must be"),
        (lambda t: t.to(torch.int32), "is I32; it must be F16 or BF16 or F32 or F8_E8M0"),
        (lambda t: t.fill_(float("inf")), "has values that are not finite"),
        (
            lambda t: torch.full((4, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "has values that are",
        ),
    ],
)
def test_damaged_scales(packed: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    name = f"{UP}.weight_scale_inv"
    rewrite(packed, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))
    assert_refused(packed, CheckpointError, rf"model\.safetensors: tensor '{name}' {message}")


def test_missing_scales(packed: Path) -> None:
    rewrite(packed, lambda tensors: tensors.pop(f"{UP}.weight_scale_inv"))
    assert_refused(packed, CheckpointError, rf"tensor '{UP}\.weight' comes without '{UP}\.weight_scale'")


def test_two_kinds_of_scales(packed: Path) -> None:
    rewrite(packed, lambda tensors: tensors.update({f"{UP}.weight_scale": torch.tensor(1.0)}))
    assert_refused(packed, UnsupportedModelError, rf"not served with: {UP}\.weight_scale$")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_weights_that_are_not_numbers(packed: Path, backend: str) -> None:
    rewrite(packed, lambda tensors: tensors[f"{UP}.weight"].view(torch.uint8)[3, 5:6].fill_(127))
    with pytest.raises(CheckpointError, match=rf"'{UP}\.weight' has weights that are not finite"):
        predict(packed, [[1]], backend)


def test_fp8_that_no_config_speaks_of(packed: Path) -> None:
    edit_config(packed, quantization_config=None)
    assert_refused(packed, UnsupportedModelError, "is F8_E4M3, which no weight is computed with")
