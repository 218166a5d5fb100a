"""compressed-tensors' directories, packed here field by field, and by the library itself."""

from __future__ import annotations

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
    Tensors,
    assert_logits,
    assert_refused,
    edit_config,
    groups,
    held,
    matrices,
    pack_quantized,
    quantize,
    quantize_directory,
    rewrite,
)

from octavo.errors import CheckpointError, UnsupportedModelError
from tiny_models import TinyModel, make_llama_directory

DOWN = "model.layers.0.mlp.down_proj"
Pack = Callable[[str, Array], tuple[Tensors, Array]]


def config(*weights: dict[str, Any], **values: Any) -> dict[str, Any]:
    made = {
        f"group_{index}": {"targets": ["Linear"], "weights": args, "input_activations": None}
        for index, args in enumerate(weights)
    }
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": made}
    return base | values


def ints(bits: int = 4, size: int | None = 32, *, symmetric: bool = True, **values: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric} | strategy | values


def packer(
    bits: int = 4, size: int | None = 32, *, symmetric: bool = True, dtype: torch.dtype = torch.float16
) -> Pack:
    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, bits, groups(weight.shape[1], size), symmetric=symmetric, dtype=dtype)
        return pack_quantized(name, w, dtype, symmetric=symmetric), w.values

    return pack


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_symmetric_integers_are_read_exactly(
    tmp_path: Path, bits: int, size: int | None, dtype: torch.dtype
) -> None:
    tiny = quantize_directory(tmp_path, config(ints(bits, size)), packer(bits, size, dtype=dtype))
    types, values, notes = held(tiny)
    assert types == {"Q4_0" if bits == 4 else "Q8_0"}
    for name, wanted in matrices(tiny).items():
        np.testing.assert_array_equal(values[name], wanted)
    where = f"in groups of {size}" if size else "with one scale a row"
    how = "q4 exactly" if bits == 4 else "q8 exactly"
    assert notes == [
        f"{tmp_path.name}: weights stored as compressed-tensors int{bits} {where} (pack-quantized), "
        f"read: 14 as {how}"
    ]
    assert_logits(tiny)


@pytest.mark.parametrize("packed_zeros", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, None), (8, 64)])
def test_packed_asymmetric_integers(tmp_path: Path, bits: int, size: int | None, packed_zeros: bool) -> None:
    packed = packer(bits, size, symmetric=False)

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        tensors, values = packed(name, weight)
        if not packed_zeros:  # as versions before 0.9 wrote them
            w = quantize(weight, bits, groups(weight.shape[1], size), symmetric=False)
            zeros = torch.from_numpy(w.z - (1 << (bits - 1))).to(torch.int8)
            tensors[f"{name}.weight_zero_point"] = zeros
        return tensors, values

    tiny = quantize_directory(tmp_path, config(ints(bits, size, symmetric=False)), pack)
    types, values, _ = held(tiny)
    assert types == {"Q4_1" if bits == 4 else "F16"}
    for name, wanted in matrices(tiny).items():
        assert np.abs(values[name] - wanted).max() <= np.abs(wanted).max() * (2.0**-11 + 2.0**-24)
    assert_logits(tiny)


@pytest.mark.parametrize(
    ("size", "scale", "type_name"), [(32, 1.0, "Q4_1"), (16, 600.0, "F16"), (16, 700.0, "F32")]
)
def test_zero_points_far_from_the_codes(tmp_path: Path, size: int, scale: float, type_name: str) -> None:
    """As I8 they may be: then weights are larger than codes alone make them."""

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        w = quantize(weight, 4, groups(weight.shape[1], size), symmetric=False)
        w.s[:], w.z[:] = scale, 8 - 100
        tensors = pack_quantized(name, w, torch.float16, symmetric=True)
        return tensors | {
            f"{name}.weight_zero_point": torch.full(w.z.shape, -100, dtype=torch.int8)
        }, w.values

    tiny = quantize_directory(tmp_path, config(ints(size=size)), pack, num_hidden_layers=1)
    types, values, _ = held(tiny)
    assert types == {type_name}
    for name, wanted in matrices(tiny).items():
        np.testing.assert_allclose(values[name], wanted, rtol=2.0**-11, atol=0)


def test_groups_of_reordered_columns(tmp_path: Path) -> None:
    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        group_of = np.random.default_rng(len(name)).permutation(groups(weight.shape[1], 32))
        w = quantize(weight, 4, group_of, symmetric=True)
        g_idx = torch.from_numpy(group_of.astype(np.int32))
        tensors = pack_quantized(name, w, torch.float16, symmetric=True)
        return tensors | {f"{name}.weight_g_idx": g_idx}, w.values

    tiny = quantize_directory(tmp_path, config(ints(actorder="group")), pack)
    assert held(tiny)[0] == {"F16"}
    assert_logits(tiny)
    rewrite(tmp_path, lambda tensors: tensors[f"{DOWN}.weight_g_idx"].add_(1))
    assert_refused(tmp_path, CheckpointError, "weight_g_idx' names groups 1 to 4; there are 4, from 0")
    edit_config(tmp_path, quantization_config=config(ints(actorder="static")))
    assert_refused(tmp_path, CheckpointError, "weight_packed' .* does not fit just one of what")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
def test_plain_integers(tmp_path: Path, strategy: str, symmetric: bool) -> None:
    cells = {"tensor": (None, None), "channel": (1, None), "group": (1, 32), "block": (24, 32)}
    args = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    args |= {"group": {"group_size": 32}, "block": {"block_structure": [24, 32]}}.get(strategy, {})

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        rows, columns = cells[strategy]
        rows, columns = rows or weight.shape[0], columns or weight.shape[1]
        down, across = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        rng = np.random.default_rng(len(name))
        scales = (0.05 * rng.uniform(0.5, 1, (down, across))).astype(np.float16)
        zeros = rng.integers(1, 9, (down, across)) * (not symmetric)
        at = np.arange(weight.shape[0])[:, None] // rows, np.arange(weight.shape[1])[None] // columns
        quants = np.clip(np.rint(weight / scales[at]) + zeros[at], -128, 127)
        tensors = {f"{name}.weight": quants.astype(np.int8), f"{name}.weight_scale": scales}
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = zeros.astype(np.int8)
        if strategy == "tensor":
            tensors[f"{name}.weight_scale"] = scales.reshape(1)
        made = {key: torch.from_numpy(value) for key, value in tensors.items()}
        return made, scales[at].astype(np.float64) * (quants - zeros[at])

    tiny = quantize_directory(tmp_path, config(args, format="int-quantized"), pack)
    types, values, _ = held(tiny)
    assert types == {"Q8_0" if symmetric else "F16"}
    for name, wanted in matrices(tiny).items():
        rounded = wanted if symmetric else wanted.astype(np.float16)
        np.testing.assert_array_equal(values[name], rounded)
    assert_logits(tiny)


def test_modules_of_different_schemes(tmp_path: Path) -> None:
    """Also in what is stacked: q in 4 bits, k in 8, v as it was."""

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        if "v_proj" in name:
            return {f"{name}.weight": torch.from_numpy(weight)}, weight
        return packer(8, 64)(name, weight) if "k_proj" in name else packer(4, 32)(name, weight)

    tiny = quantize_directory(tmp_path, config(ints(4, 32), ints(8, 64), format="mixed-precision"), pack)
    _, _, notes = held(tiny)
    assert "int4 in groups of 32, int8 in groups of 64" in notes[0]
    assert notes[0].endswith("read: 10 as q4 exactly; 2 as q8 exactly")
    assert_logits(tiny)


def test_what_is_not_applied_is_said(tmp_path: Path) -> None:
    settings = config(ints(), kv_cache_scheme={"num_bits": 8, "type": "float"})
    settings["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    tiny = quantize_directory(tmp_path, settings, packer(), num_hidden_layers=1)
    assert held(tiny)[2][1:] == [
        f"{tmp_path.name}: its quantization_config is for activations and the KV cache too; "
        "they are not quantised so"
    ]


# -- refused --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("compressed")
    settings = config(ints(symmetric=False))
    return quantize_directory(path, settings, packer(symmetric=False), num_hidden_layers=1)


@pytest.fixture
def copy(packed: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed.path, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 3),
        ("num_bits", None),
        ("type", "mx"),
        ("strategy", "tensor_group"),
        ("group_size", 0),
        ("group_size", True),
        ("dynamic", True),
        ("actorder", "sideways"),
        ("symmetric", 2),
    ],
)
def test_what_weights_may_not_be(copy: Path, key: str, value: object) -> None:
    args = ints(symmetric=False) | {key: value}
    if value is None:  # then it is 8
        del args[key]
        edit_config(copy, quantization_config=config(args))
        assert_refused(copy, CheckpointError, r"does not fit just one of what .* int8 in groups of 32")
        return
    edit_config(copy, quantization_config=config(args))
    message = rf"quantization_config\.config_groups\.group_0\.weights\.{key} is '{value}'; "
    assert_refused(copy, UnsupportedModelError, message)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format"),
        ({"format": "marlin-24"}, "format"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config\.format"),
        (
            {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            r"transform_config\.config_groups",
        ),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
        ({"config_groups": [1]}, "config_groups"),
        ({"config_groups": {"a": 1}}, r"config_groups\.a"),
        ({"config_groups": {"a": {"format": "mxfp4-pack-quantized"}}}, r"config_groups\.a\.format"),
        (
            {"config_groups": {"a": {"weights": {"strategy": "block"}}}},
            r"config_groups\.a\.weights\.block_structure",
        ),
        (
            {"config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}}},
            r"config_groups\.a\.weights\.num_bits",
        ),
    ],
)
def test_what_configs_may_not_say(copy: Path, values: dict[str, Any], key: str) -> None:
    edit_config(copy, quantization_config=config(ints(symmetric=False)) | values)
    assert_refused(copy, UnsupportedModelError, rf"config\.json: quantization_config\.{key} is ")


@pytest.mark.parametrize(
    "args",
    [ints(symmetric=False, size=64), ints(8, symmetric=False), ints(symmetric=False, size=None)],
    ids=["groups", "bits", "channels"],
)
def test_tensors_that_are_not_what_the_config_says(copy: Path, args: dict[str, Any]) -> None:
    edit_config(copy, quantization_config=config(args))
    assert_refused(copy, CheckpointError, r"weight_packed' \[\d+, \d+\] with weight_scale .* does not fit")


def test_args_that_fit_in_two_ways(tmp_path: Path) -> None:
    """Blocks of 40 and of 48 rows are both two in 64."""
    blocks = [{"num_bits": 8, "strategy": "block", "block_structure": [rows, 64]} for rows in (40, 48)]

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        cells = -(-weight.shape[0] // 40), -(-weight.shape[1] // 64)
        tensors = {f"{name}.weight": torch.ones(weight.shape, dtype=torch.int8)}
        return tensors | {f"{name}.weight_scale": torch.ones(cells)}, weight

    settings = config(*blocks, format="int-quantized")
    tiny = quantize_directory(tmp_path, settings, pack, num_hidden_layers=1)
    assert_refused(tiny.path, CheckpointError, "does not fit just one of what")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("weight_scale", rf"'{DOWN}\.weight_packed' comes without '{DOWN}\.weight_scale'"),
        ("weight_shape", rf"'{DOWN}\.weight_packed' comes without '{DOWN}\.weight_shape'"),
        ("weight_zero_point", rf"'{DOWN}\.weight_packed' .* does not fit just one of what"),
    ],
)
def test_missing_parts(copy: Path, part: str, message: str) -> None:
    rewrite(copy, lambda tensors: tensors.pop(f"{DOWN}.{part}"))
    assert_refused(copy, CheckpointError, message)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("weight_packed", lambda t: t[:, :15], "weight_packed' .* does not fit just one of what"),
        ("weight_packed", lambda t: t[:60], "weight_shape' says 64x128, which weight_packed does not have"),
        ("weight_packed", lambda t: t[None], r"weight_packed' has shape \(1, 64, 16\); it must be a matrix"),
        ("weight_packed", lambda t: t.view(torch.uint8), "weight_packed' is U8; it must be I32"),
        ("weight_packed", lambda t: t.view(torch.int8), "weight_packed' is I8; it must be I32"),
        ("weight_shape", lambda t: t * 0, "weight_shape' says 0x0"),
        ("weight_shape", lambda t: t - 64, "weight_shape' says 0x64"),
        ("weight_shape", lambda t: t + 2**60, "weight_shape' says"),
        ("weight_shape", lambda t: t.float(), "weight_shape' is F32; it must be I64 or I32"),
        ("weight_scale", lambda t: t[:, :2], "does not fit just one of what"),
        ("weight_scale", lambda t: t.int(), "weight_scale' is I32; it must be F16"),
        ("weight_scale", lambda t: t / 0, "weight_scale' has values that are not finite"),
        ("weight_zero_point", lambda t: t[:, :2], r"weight_zero_point' has shape \(8, 2\); .* \(8, 4\)"),
        (
            "weight_zero_point",
            lambda t: t.to(torch.int8),
            r"weight_zero_point' has shape \(8, 4\); .* \(64, 4\)",
        ),
        ("weight_zero_point", lambda t: t.float(), "weight_zero_point' is F32; it must be I8 or I32"),
    ],
)
def test_damaged_parts(
    copy: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    name = f"{DOWN}.{part}"
    rewrite(copy, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))
    assert_refused(copy, CheckpointError, rf"model\.safetensors: tensor '{re.escape(DOWN)}\.?.*{message}")


def test_both_packed_and_plain(tmp_path: Path) -> None:
    settings = config(ints(), ints(8, 32))
    tiny = quantize_directory(tmp_path, settings, packer(), num_hidden_layers=1)
    plain = torch.zeros(64, 128, dtype=torch.int8)
    rewrite(tiny.path, lambda tensors: tensors.update({f"{DOWN}.weight": plain}))
    assert_refused(tiny.path, CheckpointError, r"down_proj\.weight' is packed twice")


def test_weights_that_were_not_compressed(tmp_path: Path) -> None:
    """Scales beside weights that are floats still: what they are for can't be told."""

    def pack(name: str, weight: Array) -> tuple[Tensors, Array]:
        return {f"{name}.weight": torch.from_numpy(weight), f"{name}.weight_scale": torch.ones(1)}, weight

    tiny = quantize_directory(tmp_path, config(ints()), pack, num_hidden_layers=1)
    assert_refused(tiny.path, UnsupportedModelError, "not served with: .*weight_scale")


# -- as the library writes and reads it -------------------------------------------------------------------


GROUPS_OF_32 = {"num_bits": 4, "strategy": "group", "group_size": 32}
CHANNELS = {"num_bits": 8, "strategy": "channel"}
TENSORS = {"num_bits": 8, "strategy": "tensor"}
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
FLOATS = {"type": "float"}
ASYMMETRIC = {"symmetric": False}


@pytest.mark.parametrize(
    ("weights", "activations", "type_name"),
    [
        (GROUPS_OF_32, None, "Q4_0"),
        (GROUPS_OF_32 | {"group_size": 64} | ASYMMETRIC, None, "Q4_1"),
        (GROUPS_OF_32 | {"group_size": 16}, None, "F16"),
        (GROUPS_OF_32 | {"num_bits": 8}, None, "Q8_0"),
        (CHANNELS | {"num_bits": 4} | ASYMMETRIC, None, "Q4_1"),
        (CHANNELS, None, "Q8_0"),
        (CHANNELS, TOKENS, "Q8_0"),
        (CHANNELS | ASYMMETRIC, TENSORS, "F16"),
        (TENSORS, TENSORS, "Q8_0"),
        (TENSORS | FLOATS, TENSORS | FLOATS, "BF16"),
        (CHANNELS | FLOATS, TOKENS | FLOATS, "BF16"),
        ({"strategy": "block", "block_structure": [48, 32]} | FLOATS, None, "BF16"),
    ],
)
def test_what_the_library_writes(
    tmp_path: Path, weights: dict[str, Any], activations: dict[str, Any] | None, type_name: str
) -> None:
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from transformers import AutoModelForCausalLM

    tiny = make_llama_directory(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    scheme = library.quantization.QuantizationScheme(
        targets=["Linear"],
        weights=library.quantization.QuantizationArgs(**weights),
        input_activations=activations and library.quantization.QuantizationArgs(**activations),
    )
    settings = library.quantization.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    library.quantization.apply_quantization_config(model, settings)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            calibrate(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(model)
    with torch.no_grad():
        for ours, theirs in zip(tiny.model.parameters(), trained(model), strict=True):
            ours.copy_(theirs)

    types, values, notes = held(tiny)
    assert types == {type_name}
    assert bool(activations) == any("for activations too" in note for note in notes)
    rounding = {"Q8_0": 2.0**-11, "BF16": 2.0**-8}.get(type_name, 2.0**-10) + 2.0**-23
    for name, wanted in matrices(tiny).items():
        assert np.abs(values[name] - wanted).max() <= rounding * np.abs(wanted).max()
    assert_logits(tiny)


def trained(model: Any) -> list[torch.Tensor]:
    """The parameters that the model had before it was quantised."""
    return [value for name, value in model.named_parameters() if name.endswith(".weight")]


def calibrate(module: Any, args: Any) -> None:
    """Scales and zero points that cover the weights."""
    from compressed_tensors.quantization.utils import calculate_qparams

    weight, cells = module.weight.detach(), module.weight_scale.shape
    low, high = torch.empty(cells), torch.empty(cells)
    rows = -(-weight.shape[0] // cells[0]) if args.strategy == "block" else weight.shape[0] // cells[0]
    columns = weight.shape[1] if len(cells) == 1 else -(-weight.shape[1] // cells[1])
    for row in range(cells[0]):
        for column in range(1 if len(cells) == 1 else cells[1]):
            part = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            low.reshape(cells[0], -1)[row, column] = part.min()
            high.reshape(cells[0], -1)[row, column] = part.max()
    scale, zero_point = calculate_qparams(low, high, args)
    module.weight_scale.data.copy_(scale)
    module.weight_zero_point.data.copy_(zero_point)
