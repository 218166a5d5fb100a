"""Llama files of every GGUF tensor type, against `transformers` with the dequantised weights.

Two bounds. Against weights as Octavo holds them, only float32 is between us and the oracle: the tolerance
of test_llama.py. Against the file's own, a matrix W became W + E, with E measured. In norm, errors are
handed on as they are and add up: the logits move by at most the sum of |E| / |W| (Frobenius) over the
matrices on the path, where those stacked count by their worst part, and q, k and v twice, since they move
what attention weighs as well as its weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_llama import predict, random_ids, tolerance

from gguf_converter import interleave
from octavo.backends.native import library
from octavo.errors import CheckpointError
from octavo.quantization.conversion import convert, dequantize
from octavo.quantization.formats import NATIVE_TYPES, STORED_TYPES, Format, common_format
from octavo.quantization.packing import unpack_groups
from octavo.runner.model_runner import ModelRunner
from octavo.weights.gguf import GGUFFile
from tiny_models import NUM_TOKENS, TinyModel, make_llama_gguf

TYPES = [name for name in STORED_TYPES if name not in ("NVFP4", "Q1_0")]  # newer than our oldest gguf
#: Rows of 256: a block of the K-quants.
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
#: What is stacked is held in one format.
STACKED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def hold_as_octavo_does(tiny: TinyModel, kind_of: Callable[[str], str]) -> float:
    """Give the oracle the weights after conversion; return the bound on what that changes."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, tiny.model.config.num_hidden_layers)
    file = GGUFFile.open(tiny.path)
    heads = {"q_proj": tiny.model.config.num_attention_heads, "k_proj": tiny.model.config.num_key_value_heads}
    worst: dict[str, float] = {}
    for name, parameter in tiny.model.named_parameters():
        if parameter.ndim != 2:
            continue
        projection = name.split(".")[-2]
        together = next((stack for stack in STACKED if projection in stack), (projection,))
        format_ = common_format(kind_of(name.replace(projection, other)) for other in together)
        stored = names.get_name(name, try_suffixes=(".weight",))
        held = value(convert(file.raw(stored), kind_of(name), format_), format_)
        before = parameter.numpy()
        if projection in heads:
            order = interleave(np.arange(len(held)), heads[projection])
            held = held[np.argsort(order)]
        key = name.replace(projection, together[0])
        worst[key] = max(worst.get(key, 0), float(np.linalg.norm(held - before) / np.linalg.norm(before)))
        parameter.copy_(torch.from_numpy(held.astype(np.float64)))
    file.close()
    tied = tiny.model.config.tie_word_embeddings
    twice = [error for key, error in worst.items() if "q_proj" in key or (tied and "embed_tokens" in key)]
    return sum(worst.values()) + sum(twice)


def value(raw: npt.NDArray[np.uint8], format_: Format) -> npt.NDArray[np.float32]:
    if not format_.quantized:
        return dequantize(raw, NATIVE_TYPES[format_])
    return unpack_groups(NATIVE_TYPES[format_], raw).values()


def assert_logits(tmp_path: Path, kind_of: Callable[[str], str], **overrides: Any) -> float:
    """Both bounds; returns how much of the logits conversion may change."""
    tiny = make_llama_gguf(tmp_path, quantization=kind_of, **(SHAPE | overrides))
    ids = random_ids(20)
    stored = tiny.logits(ids)
    found = predict(tiny.path, ids, max_model_len=32)
    with torch.no_grad():
        moved = hold_as_octavo_does(tiny, kind_of)
    held = tiny.logits(ids)
    rounding = tolerance(tiny, held)
    assert np.abs(found - held).max() < rounding
    rounding_in_norm = rounding / np.abs(held).max()
    assert np.linalg.norm(found - stored) < (moved + rounding_in_norm) * np.linalg.norm(stored)
    assert stored.std() > 0.5, "a model whose logits are all alike tests nothing"
    if library.available():
        # Activations become integers, of 4095 levels a side where weights are q8, and KV f16.
        native = predict(tiny.path, ids, max_model_len=32, backend="native")
        matrices = 4 * tiny.model.config.num_hidden_layers + 1
        assert np.abs(native - held).max() < (matrices * 2.0**-11 + 2.0**-11) * np.abs(held).max() + rounding
    return moved


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_loads(tmp_path: Path, type_name: str, tied: bool) -> None:
    moved = assert_logits(tmp_path, lambda name: type_name, tie_word_embeddings=tied)
    assert (moved == 0) == STORED_TYPES[type_name].lossless
    assert moved < 0.05


def test_files_of_mixed_types(tmp_path: Path) -> None:
    """As llama.cpp's Q4_K_M mixes them, and worse: every part of a stacked matrix another type."""
    types = {
        "q_proj": "Q4_K",
        "k_proj": "Q4_0",
        "v_proj": "Q6_K",
        "o_proj": "Q5_K",
        "gate_proj": "Q4_1",
        "up_proj": "F16",
        "down_proj": "Q8_0",
        "embed_tokens": "Q6_K",
        "lm_head": "BF16",
    }
    assert assert_logits(tmp_path, lambda name: types[name.split(".")[-2]], num_hidden_layers=2) < 0.05


@pytest.mark.parametrize("type_name", ["Q4_0", "Q6_K"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_odd_vocabularies(tmp_path: Path, type_name: str, tied: bool) -> None:
    assert_logits(tmp_path, lambda name: type_name, tie_word_embeddings=tied, vocab_size=NUM_TOKENS + 741)


def test_a_vocabulary_of_32003(tmp_path: Path) -> None:
    assert_logits(tmp_path, lambda name: "Q5_1", vocab_size=32003)


def test_quantised_arithmetic_on_torch_is_the_natives(tmp_path: Path) -> None:
    """The torch backend in the native one's arithmetic holds the same integers."""
    from octavo.backends.torch.backend import TorchBackend
    from octavo.config.resolve import resolve

    tiny = make_llama_gguf(tmp_path, quantization="Q4_K", **SHAPE)
    ids = random_ids(20)
    config = resolve({"threads": 1, "max_model_len": 32, "activation_bits": "16"}).config
    runner = ModelRunner(tiny.path, config, backend=TorchBackend(quantized=True, num_threads=1))
    found = runner.predict(ids)
    runner.close()
    with torch.no_grad():
        hold_as_octavo_does(tiny, lambda name: "Q4_K")
    held = tiny.logits(ids)
    assert np.abs(found - held).max() < 6 * 2.0**-11 * np.abs(held).max()


def test_what_was_rounded_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make_llama_gguf(tmp_path, quantization="Q4_K", **SHAPE)
    with caplog.at_level(logging.INFO):
        predict(tiny.path, [[1]])
    (line,) = [r.message for r in caplog.records if "tiny-llama" in r.message]
    assert line == (
        "tiny-llama-q4_k.gguf: tensors held in a format near their own, rounded to nearest: 9 of Q4_K as q4m"
    )


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_weights_that_no_format_reaches_are_named(tmp_path: Path, backend: str) -> None:
    if backend == "native" and not library.available():
        pytest.skip("the native library is not built")
    tiny = make_llama_gguf(tmp_path, quantization="Q4_K", **SHAPE)
    file = GGUFFile.open(tiny.path)
    offset = file.tensors["blk.0.ffn_down.weight"].offset
    file.close()
    with tiny.path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(np.float16(60000).tobytes())
    name = r"tiny-llama-q4_k\.gguf: weight 'model\.layers\.0\.mlp\.down_proj\.weight'"
    with pytest.raises(CheckpointError, match=rf"{name}: it has a scale or a min of .*; q4m"):
        predict(tiny.path, [[1]], backend=backend)
