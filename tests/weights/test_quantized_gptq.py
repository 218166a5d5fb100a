"""GPTQ's and AWQ's directories, packed field by field, against `transformers` with what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packers import (
    Array,
    Quantized,
    Tensors,
    assert_logits,
    assert_refused,
    awq,
    edit_config,
    gptq,
    groups,
    held,
    matrices,
    predict,
    quantize,
    quantize_directory,
    rewrite,
)
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError, UnsupportedModelError
from tiny_models import TinyModel

DOWN = "model.layers.0.mlp.down_proj"
Pack = Callable[[str, Array], tuple[Tensors, Array]]


def gptq_config(**values: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return base | values


def gptq_packer(
    bits: int = 4,
    size: int | None = 32,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    less_one: bool = True,
    reorder: bool = False,
    wanted: Callable[[Quantized], Array] = lambda w: w.values,
) -> Pack:
    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        group_of = groups(weight.shape[1], size)
        if reorder:
            group_of = np.random.default_rng(len(name)).permutation(group_of)
        w = quantize(weight, bits, group_of, symmetric=symmetric, dtype=dtype)
        return gptq(name, w, dtype, less_one=less_one), wanted(w)

    return pack


@pytest.mark.parametrize("layout", [{}, {"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"}])
@pytest.mark.parametrize("size", [32, 64, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_gptq_is_read_exactly(
    tmp_path: Path, bits: int, size: int | None, layout: dict[str, str]
) -> None:
    config = gptq_config(bits=bits, group_size=size or -1, **layout)
    tiny = quantize_directory(tmp_path, config, gptq_packer(bits, size, less_one=not layout))
    types, values, notes = held(tiny)
    assert types == {"Q4_0" if bits == 4 else "Q8_0"}
    for name, wanted in matrices(tiny).items():
        np.testing.assert_array_equal(values[name], wanted)
    where = f"groups of {size}" if size else "one group a row"
    how = "q4 exactly" if bits == 4 else "q8 exactly"
    assert notes == [f"{tmp_path.name}: weights stored as GPTQ int{bits} in {where}, read: 14 as {how}"]
    if not layout:
        assert_logits(tiny)


def test_codes_at_the_ends_of_int8(tmp_path: Path) -> None:
    """-128 is no magnitude that Octavo itself writes to q8."""
    rng = np.random.default_rng(0)

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        group_of = groups(weight.shape[1], 32)
        w = quantize(weight, 8, group_of, symmetric=True)
        w.q[rng.random(w.q.shape) < 0.1] = 0
        w.q[rng.random(w.q.shape) < 0.1] = 255
        return gptq(name, w), w.values

    assert_logits(quantize_directory(tmp_path, gptq_config(bits=8), pack))


def offset_rounding(values: Array) -> float:
    """What rounding offsets to f16 may change: 2^-11 of the largest, which is a weight's distance from 0 when
    its code is 0, and the sum's own rounding."""
    return float(np.abs(values).max() * (2.0**-11 + 2.0**-24))


@pytest.mark.parametrize("less_one", [True, False])
def test_asymmetric_gptq_of_4_bits(tmp_path: Path, less_one: bool) -> None:
    config = gptq_config(sym=False, checkpoint_format="gptq" if less_one else "gptq_v2")
    tiny = quantize_directory(tmp_path, config, gptq_packer(symmetric=False, less_one=less_one))
    types, values, notes = held(tiny)
    assert types == {"Q4_1"}
    assert notes[0].endswith("14 as q4m, scales and offsets rounded to f16")
    for name, wanted in matrices(tiny).items():
        assert np.abs(values[name] - wanted).max() <= offset_rounding(wanted)
    if less_one:
        assert_logits(tiny)


@pytest.mark.parametrize(
    ("bits", "size", "symmetric", "reorder"),
    [
        (8, 32, False, False),
        (4, 48, True, False),
        (4, 16, False, False),
        (4, 32, True, True),
        (8, 32, False, True),
    ],
)
def test_what_groups_of_32_do_not_hold_is_dequantised(
    tmp_path: Path, bits: int, size: int, symmetric: bool, reorder: bool
) -> None:
    config = gptq_config(bits=bits, group_size=size, sym=symmetric, desc_act=reorder)
    tiny = quantize_directory(
        tmp_path, config, gptq_packer(bits, size, symmetric=symmetric, reorder=reorder), num_hidden_layers=1
    )
    types, values, notes = held(tiny)
    assert types == {"F16"}
    assert notes[0].endswith("7 as f16, rounded to nearest")
    for name, wanted in matrices(tiny).items():
        np.testing.assert_array_equal(values[name], wanted.astype(np.float16).astype(np.float32))
    assert_logits(tiny)


def test_reordering_within_groups_of_32_changes_nothing(tmp_path: Path) -> None:
    """Groups in another order are still whole."""

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, 4, groups(weight.shape[1], 32)[::-1].copy(), symmetric=True)
        return gptq(name, w), w.values

    tiny = quantize_directory(tmp_path, gptq_config(desc_act=True), pack)
    types, values, _ = held(tiny)
    assert types == {"Q4_0"}
    for name, wanted in matrices(tiny).items():
        np.testing.assert_array_equal(values[name], wanted)


@pytest.mark.parametrize(
    ("dtype", "factor", "expected"),
    [
        (torch.bfloat16, 1.0, "q4 exactly"),
        (torch.float32, 1.0, "q4, scales rounded to f16"),
        (torch.float32, 1e-6, "f32"),
        (torch.float32, 1e7, "f32"),
        (torch.float16, 1e-5, "q4 exactly"),
    ],
)
def test_scales_of_other_types(tmp_path: Path, dtype: torch.dtype, factor: float, expected: str) -> None:
    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight * factor, 4, groups(weight.shape[1], 32), symmetric=True, dtype=dtype)
        return gptq(name, w, dtype), w.values

    tiny = quantize_directory(tmp_path, gptq_config(), pack, num_hidden_layers=1)
    _, values, notes = held(tiny)
    assert notes[0].endswith(f"7 as {expected}")
    for name, wanted in matrices(tiny).items():
        if "exactly" in expected:
            np.testing.assert_array_equal(values[name], wanted)
        else:
            np.testing.assert_allclose(values[name], wanted, rtol=2.0**-11, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 64, None])
def test_awq(tmp_path: Path, size: int | None, symmetric: bool) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": size or -1, "version": "GEMM"}

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, 4, groups(weight.shape[1], size), symmetric=symmetric)
        return awq(name, w), w.values

    tiny = quantize_directory(tmp_path, config | {"zero_point": not symmetric}, pack)
    types, values, notes = held(tiny)
    assert types == {"Q4_0" if symmetric else "Q4_1"}
    assert "AWQ int4" in notes[0]
    for name, wanted in matrices(tiny).items():
        assert np.abs(values[name] - wanted).max() <= (0 if symmetric else offset_rounding(wanted))
    assert_logits(tiny)


def test_awq_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    """The library's own reading of AWQ's files."""
    converters = pytest.importorskip(
        "compressed_tensors.entrypoints.convert", reason="compressed-tensors is not installed, or before 0.14"
    )

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, 4, groups(weight.shape[1], 32), symmetric=False)
        return awq(name, w), w.values

    tiny = quantize_directory(tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 32}, pack)
    read = held(tiny)
    converter = converters.AutoAWQConverter(group_size=32)
    rewrite(tmp_path, lambda tensors: tensors.update(converter.process(dict(tensors))))
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if is_awqs(name)])
    args = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32}
    groups_ = {"all": {"targets": ["Linear"], "weights": args}}
    converted = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups_}
    edit_config(tmp_path, quantization_config=converted)
    again = held(tiny)
    assert read[0] == again[0]
    for name, values in read[1].items():
        np.testing.assert_array_equal(values, again[1][name])


def is_awqs(name: str) -> bool:
    return name.endswith((".qweight", ".qzeros", ".scales"))


def test_biases(tmp_path: Path) -> None:
    """A model's own stay beside the packed weights. AutoGPTQ writes some for layers that have none."""
    tiny = quantize_directory(tmp_path, gptq_config(), gptq_packer(), attention_bias=True)
    assert_logits(tiny)
    idle, active = f"{DOWN}.bias", "model.layers.1.mlp.up_proj.bias"
    rewrite(tmp_path, lambda tensors: tensors.update({idle: torch.zeros(64, dtype=torch.float16)}))
    assert_logits(tiny)
    rewrite(tmp_path, lambda tensors: tensors.update({active: torch.full((128,), 1e-3)}))
    with pytest.raises(UnsupportedModelError, match=rf"not served with: {re.escape(active)}$"):
        predict(tmp_path, [[1]])


def test_modules_that_were_not_converted(tmp_path: Path) -> None:
    """Which they are is read from the file; stacked weights take the wider format."""
    packed = gptq_packer()

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        if "k_proj" in name or "layers.1.mlp" in name:
            return {f"{name}.weight": torch.from_numpy(weight)}, weight
        return packed(name, weight)

    assert_logits(quantize_directory(tmp_path, gptq_config(), pack))


def test_a_packed_head(tmp_path: Path) -> None:
    """It is not the copy of the embedding that some files keep."""
    tiny = quantize_directory(tmp_path, gptq_config(), gptq_packer(), num_hidden_layers=1)

    def change(tensors: Tensors) -> None:
        packed, values = gptq_packer()("lm_head", tensors.pop("lm_head.weight").numpy()[:256])
        tensors.update(packed)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:256].contiguous()
        with torch.no_grad():
            tiny.model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(values))

    rewrite(tmp_path, change)
    edit_config(tmp_path, vocab_size=256)
    ids = [[1, 2, 3]]
    assert np.abs(predict(tmp_path, ids) - tiny.logits(ids)).max() < 1e-4
    edit_config(tmp_path, tie_word_embeddings=True)
    assert_refused(tmp_path, UnsupportedModelError, r"not served with: lm_head\.weight$")


def test_parts_may_lie_in_different_files(tmp_path: Path) -> None:
    tiny = quantize_directory(tmp_path, gptq_config(), gptq_packer())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    shards: list[Tensors] = [{}, {}]
    for index, name in enumerate(sorted(tensors)):
        shards[index % 2][name] = tensors[name]
    weight_map = {}
    for index, shard in enumerate(shards):
        save_file(shard, tmp_path / f"model-{index}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_logits(tiny)


# -- refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("gptq")
    return quantize_directory(path, gptq_config(), gptq_packer(), num_hidden_layers=1)


@pytest.fixture
def copy(packed: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed.path, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 3),
        ("bits", 2),
        ("bits", "4"),
        ("bits", None),
        ("bits", 4.0),
        ("group_size", 0),
        ("group_size", -2),
        ("group_size", 10**30),
        ("group_size", None),
        ("checkpoint_format", "marlin"),
        ("format", "gptq_p"),
        ("is_marlin_format", True),
        ("rotation", "hadamard"),
        ("adapter", "eora"),
        ("sym", "yes"),
        ("desc_act", 1),
        ("pack_dtype", "int64"),
    ],
)
def test_what_gptq_configs_may_not_say(copy: Path, key: str, value: object) -> None:
    edit_config(copy, quantization_config=gptq_config(**{key: value}))
    shown = re.escape(str(value))
    assert_refused(
        copy, UnsupportedModelError, rf"config\.json: quantization_config\.{key} is '{shown}'; .* GGUF file"
    )


def test_formats_that_contradict_each_other(copy: Path) -> None:
    both = gptq_config(format="gptq_v2", checkpoint_format="gptq")
    edit_config(copy, quantization_config=both)
    assert_refused(
        copy, UnsupportedModelError, r"quantization_config\.format is 'gptq_v2'; served are 'gptq'"
    )


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_missing_parts(copy: Path, part: str) -> None:
    rewrite(copy, lambda tensors: tensors.pop(f"{DOWN}.{part}"))
    assert_refused(
        copy, CheckpointError, rf"model\.safetensors: tensor '{DOWN}\.qweight' comes without '{DOWN}\.{part}'"
    )


def test_reordering_without_an_order(copy: Path) -> None:
    edit_config(copy, quantization_config=gptq_config(desc_act=True))
    rewrite(copy, lambda tensors: tensors.pop(f"{DOWN}.g_idx"))
    assert_refused(copy, CheckpointError, rf"'{DOWN}\.qweight' comes without '{DOWN}\.g_idx'")
    edit_config(copy, quantization_config=gptq_config())  # then it is not needed
    assert predict(copy, [[1]]).shape[-1] > 0


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda t: t.to(torch.int64), "is I64; it must be I32"),
        ("qweight", lambda t: t.view(torch.float32), "is F32; it must be I32"),
        ("qweight", lambda t: t.reshape(-1), r"has shape \(1024,\); it must be a matrix"),
        ("qweight", lambda t: t[:, :0], r"has shape \(16, 0\); it must be a matrix"),
        ("scales", lambda t: t.to(torch.int16), "is I16; it must be F16 or BF16 or F32"),
        ("scales", lambda t: t[:2], r"has shape \(2, 64\); what it belongs to makes it \(4, 64\)"),
        ("scales", lambda t: t * float("nan"), "has values that are not finite"),
        ("scales", lambda t: t.float() * float("inf"), "has values that are not finite"),
        ("qzeros", lambda t: t[:, :7], r"has shape \(4, 7\); what it belongs to makes it \(4, 8\)"),
        ("qzeros", lambda t: t.to(torch.uint8), "is U8; it must be I32"),
        ("g_idx", lambda t: t[:100], r"has shape \(100,\); what it belongs to makes it \(128,\)"),
        ("g_idx", lambda t: t + 1, "names groups 1 to 4; there are 4, from 0"),
        ("g_idx", lambda t: t - 1, "names groups -1 to 2; there are 4, from 0"),
        ("g_idx", lambda t: t.flip(0), "reorders columns, but desc_act is not true"),
        ("g_idx", lambda t: t.long(), "is I64; it must be I32"),
    ],
)
def test_damaged_parts(
    copy: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    name = f"{DOWN}.{part}"
    rewrite(copy, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))
    assert_refused(copy, CheckpointError, rf"model\.safetensors: tensor '{name}' {message}")


def test_zero_points_that_programs_read_differently(copy: Path) -> None:
    edit_config(copy, quantization_config=gptq_config(sym=False))
    name = f"{DOWN}.qzeros"
    rewrite(copy, lambda tensors: tensors[name].fill_(-1))
    assert_refused(
        copy,
        UnsupportedModelError,
        rf"model\.safetensors: tensor '{name}' has zero points stored as 15.*gptq_v2",
    )


def test_layouts_are_not_confused(copy: Path) -> None:
    """Read as the other layout, every zero point is off by one."""
    edit_config(copy, quantization_config=gptq_config(checkpoint_format="gptq_v2"))
    assert_refused(copy, CheckpointError, r"qzeros' holds a zero point of 7, but sym is true in config\.json")
    edit_config(copy, quantization_config=gptq_config(bits=8))
    assert_refused(copy, CheckpointError, r"what it belongs to makes it")
    awq_config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    edit_config(copy, quantization_config=awq_config)
    assert_refused(copy, CheckpointError, r"what it belongs to makes it")


def test_a_weight_that_is_there_twice(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({f"{DOWN}.weight": torch.zeros(64, 128)}))
    assert_refused(copy, CheckpointError, rf"'{DOWN}\.weight' is there both packed and unpacked")


@pytest.mark.parametrize(
    ("key", "value"),
    [("bits", 8), ("version", "gemv"), ("format", "marlin"), ("backend", "llm-awq"), ("zero_point", "no")],
)
def test_what_awq_configs_may_not_say(copy: Path, key: str, value: object) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, key: value}
    edit_config(copy, quantization_config=config)
    assert_refused(copy, UnsupportedModelError, rf"quantization_config\.{key} is '{value}'; ")
