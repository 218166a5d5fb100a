"""`--quantization`: which weights are quantised as a model is loaded, and what it answers then."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.errors import ConfigError
from octavo.quantization.formats import GROUP, NATIVE_TYPES, Format
from octavo.quantization.packing import unpack_groups
from octavo.quantization.quantize import quantize
from octavo.runner.model_runner import ModelRunner
from octavo.weights.quantize_on_load import format_on_load
from tiny_models import NUM_TOKENS, make_llama_directory, make_llama_gguf

IDS = np.random.default_rng(0).integers(0, NUM_TOKENS, (1, 24)).tolist()
LAYER = "model.layers.0."
BACKENDS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not library.available(), reason="none"))]


def run(path: Path, **settings: Any) -> tuple[npt.NDArray[np.float32], ModelRunner]:
    config = {"threads": 1, "max_model_len": 32, "kv_dtype": "f32", "activation_bits": "16", **settings}
    runner = ModelRunner(path, resolve(config).config)
    logits = runner.predict(IDS)
    runner.close()
    return logits, runner


@pytest.mark.parametrize(
    ("names", "int8", "int4"),
    [
        ([f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"], Format.Q8, Format.Q4M),
        ([f"{LAYER}mlp.down_proj.weight"], Format.Q8, Format.Q4M),
        ([f"{LAYER}mlp.experts.{e}.up_proj.weight" for e in range(4)], Format.Q8, Format.Q4M),
        ([f"{LAYER}block_sparse_moe.experts.7.w2.weight"], Format.Q8, Format.Q4M),
        (["model.embed_tokens.weight"], Format.Q8, Format.Q8),
        (["lm_head.weight"], Format.Q8, Format.Q8),
        ([f"{LAYER}mlp.gate.weight"], None, None),
        ([f"{LAYER}block_sparse_moe.gate.weight"], None, None),
        ([f"{LAYER}input_layernorm.weight"], None, None),
        ([f"{LAYER}self_attn.q_proj.bias"], None, None),
    ],
)
def test_which_weights_become_what(names: list[str], int8: Format | None, int4: Format | None) -> None:
    assert format_on_load(names, "int8") is int8
    assert format_on_load(names, "int4") is int4
    assert format_on_load(names, "none") is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_holds_its_quantised_weights(
    tmp_path: Path, quantization: str, dtype: str, backend: str
) -> None:
    """Against `transformers` with the same weights quantised by themselves."""
    tiny = make_llama_directory(tmp_path, dtype=dtype)
    plain = tiny.logits(IDS)
    found, runner = run(tmp_path, quantization=quantization, backend=backend)
    formats = [Format.Q8] if quantization == "int8" else [Format.Q8, Format.Q4M]
    assert set(runner.weight_formats) == set(formats)
    with torch.no_grad():
        for name, parameter in tiny.model.named_parameters():
            format_ = format_on_load([name], quantization)
            if format_ is not None:
                raw = quantize(parameter.float().numpy(), format_)
                held = unpack_groups(NATIVE_TYPES[format_], raw).values()
                parameter.copy_(torch.from_numpy(held))
    held = tiny.logits(IDS)
    # On torch arithmetic is f32's; on native activations have 4095 levels a side at least, in 10 matrices.
    assert np.abs(found - held).max() < (1e-4 if backend == "torch" else 10 * 2.0**-11) * np.abs(held).max()
    moved = np.linalg.norm(held - plain) / np.linalg.norm(plain)
    assert moved < (0.05 if quantization == "int8" else 0.5)
    assert moved > 0


def test_what_is_tied_is_quantised_once(tmp_path: Path) -> None:
    make_llama_directory(tmp_path, dtype="bfloat16", tie_word_embeddings=True)
    _, runner = run(tmp_path, quantization="int4", backend="torch")
    by_name = {weight.name: weight.format for weight in runner.program.weights if len(weight.shape) > 1}
    assert by_name["model.embed_tokens.weight"] is Format.Q8
    assert "lm_head.weight" not in by_name


def test_rows_of_no_whole_groups_stay(tmp_path: Path) -> None:
    make_llama_directory(tmp_path, dtype="bfloat16", intermediate_size=GROUP * 3 + 8)
    _, runner = run(tmp_path, quantization="int8", backend="torch")
    formats = {weight.name: weight.format for weight in runner.program.weights}
    assert formats["model.layers.0.mlp.down_proj.weight"] is Format.BF16
    assert formats["model.layers.0.self_attn.o_proj.weight"] is Format.Q8


def test_a_gguf_file_keeps_what_it_has_quantised(tmp_path: Path) -> None:
    tiny = make_llama_gguf(tmp_path, quantization=lambda name: "Q4_1" if "down_proj" in name else "BF16")
    _, runner = run(tiny.path, quantization="int8", backend="torch")
    formats = {weight.name: weight.format for weight in runner.program.weights}
    assert formats["model.layers.0.mlp.down_proj.weight"] is Format.Q4M
    assert formats["model.layers.0.self_attn.o_proj.weight"] is Format.Q8


def test_where_there_is_nothing_to_quantise_it_is_refused(tmp_path: Path) -> None:
    tiny = make_llama_gguf(tmp_path, quantization="Q8_0")
    with pytest.raises(ConfigError, match=r"--quantization int4 .* tiny-llama-q8_0\.gguf are q8 already"):
        run(tiny.path, quantization="int4", backend="torch")


def test_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_llama_directory(tmp_path, dtype="bfloat16")
    with caplog.at_level(logging.INFO):
        run(tmp_path, quantization="int4", backend="torch")
    (line,) = [r.message for r in caplog.records if "rounded to nearest" in r.message]
    assert line.endswith("14 of BF16 as q4m, 2 of BF16 as q8")


@pytest.mark.skipif(not library.available(), reason="the native library is not built")
def test_threads_make_no_difference(tmp_path: Path) -> None:
    make_llama_directory(tmp_path, dtype="bfloat16")
    settings = {"quantization": "int4", "backend": "native"}
    one, three = (run(tmp_path, **settings, threads=n)[0] for n in (1, 3))
    assert np.array_equal(one, three)
