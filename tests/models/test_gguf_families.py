"""GGUF files of every family against transformers: tiny random models, written as llama.cpp's converter does.

Oracle and tolerance are those of test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_families import make_runner, oracle

from families import FAMILIES, VOCAB, make_model
from gguf_converter import encode_as, write_gguf
from octavo import ModelRunner
from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.errors import OctavoError
from octavo.models.registry import model_builder
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import DType
from octavo.quantization.formats import Format
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_config import config_of, family_of

#: What a converter loses: Qwen2's windows, and that Qwen3-MoE may keep its shares as they are.
LOST = ("qwen2 window", "qwen3 moe, shares as they are")
#: What GGUF takes for granted: which layers have windows, rotation, experts; the root that divides scores.
GRANTED: dict[str, dict[str, Any]] = {
    "qwen3 moe": {"mlp_only_layers": []},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "smollm3, every fourth layer": {"no_rope_layer_interval": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    },
}
#: Besides those that a family's file has.
OTHER_KEYS = {
    *("attention.value_length", "attention.sliding_window", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.freq_base_swa"),
    *("expert_count", "expert_used_count", "rope.scaling.original_context_length"),
}
ODD_VALUES: list[Any] = [
    *(0, 1, 3, 63, 2**20, 2**31 - 1, 2**63, -1, 1.5, 0.0, float("nan"), float("inf"), 1e30, 1e-30),
    *(True, False, "", "yarn", "linear", "longrope", [], [1], [2, 2, 2], [1, 2], [True] * 7),
]
CONVERTED = [name for name in FAMILIES if name not in LOST]


def written(path: Path, family: str, types: str | Callable[[str], str] = "F32") -> tuple[Path, Any]:
    """A family's file, and the model with the weights that the file holds."""
    model = make_model(family, **GRANTED.get(family, {}))
    file = path / f"{family.replace(' ', '-')}.gguf"
    write_gguf(file, model, encode=encode_as(types))
    return file, model


def mixed(name: str) -> str:
    """A type by a tensor's name."""
    kinds = {"gate_proj": "Q8_0", "down_proj": "Q4_0", "embed_tokens": "F16"}
    return kinds.get(name.split(".")[-2], "Q5_0")


def random_ids(length: int, batch: int = 2) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(length).integers(0, VOCAB, (batch, length)).tolist()
    return ids


def assert_logits(path: Path, model: Any, length: int) -> None:
    """Whole as transformers says, and in chunks the same bits."""
    ids = random_ids(length)
    exact, error = oracle(model, ids)
    whole = make_runner(path, max_num_batched_tokens=128, max_num_seqs=128, max_model_len=128).predict(ids)
    assert np.abs(whole - exact).max() <= 32 * max(error, 1e-7 * np.abs(exact).max())
    chunks = make_runner(path, max_num_batched_tokens=5, max_num_seqs=5, max_model_len=128)
    assert np.array_equal(chunks.predict(ids), whole)


@pytest.mark.parametrize("family", CONVERTED)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, family)
    for length in (9, 100):  # a window of 8 and one more; beyond the context that yarn and longrope stretch
        assert_logits(path, model, length)


@pytest.mark.parametrize("family", CONVERTED)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, family)
    (prompt,) = random_ids(20, batch=1)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None
        )  # fmt: skip
    runner = make_runner(path, max_num_batched_tokens=32, max_num_seqs=32, max_model_len=32)
    found = list(prompt)
    for _ in range(8):
        found.append(int(runner.predict([found])[0, -1].argmax()))
    assert found == expected[0].tolist()


@pytest.mark.parametrize("types", ["Q8_0", "Q4_1", "F16", "BF16", "MXFP4", "mixed"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe", "gpt-oss", "phi3", "gemma3"])
def test_stacks_and_fused_tensors_of_other_types(family: str, types: str, tmp_path: Path) -> None:
    """A stack's matrices are read where they lie in it. What is stacked here fits one format exactly."""
    path, model = written(tmp_path, family, mixed if types == "mixed" else types)
    assert_logits(path, model, 40)


def test_experts_keep_the_format_of_their_stack(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "mixtral", "Q4_1")
    runner = make_runner(path, max_model_len=32)
    formats = {weight.name: weight.format for weight in runner.program.weights if "experts" in weight.name}
    assert len(formats) == 2 * 3
    assert set(formats.values()) == {Format.Q4M}
    assert not runner.checkpoint.notes


@pytest.mark.parametrize(
    "family",
    [
        *("llama llama3 rope", "llama yarn rope", "mistral window", "mixtral", "qwen2", "qwen3", "qwen3 moe"),
        *("gpt-oss", "smollm3", "phi3 longrope", "granite", "olmo2", "gemma2", "gemma3"),
    ],
)
def test_any_value_of_any_key_makes_a_program_or_is_refused(family: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path, family)
    file = GGUFFile.open(path)
    architecture, metadata = file.metadata["general.architecture"], file.metadata
    keys = {key.removeprefix(f"{architecture}.") for key in metadata if key.startswith(f"{architecture}.")}
    refused = 0
    for key in sorted(keys | OTHER_KEYS):
        for value in ODD_VALUES:
            file.metadata = metadata | {f"{architecture}.{key}": value}
            b = ProgramBuilder(family, format_of=lambda parts: Format.F32, kv_dtype=DType.F32)
            try:
                config = config_of(file)
                model_builder(family_of(file))(b, config, config["max_position_embeddings"])
            except OctavoError:
                refused += 1
    assert refused > len(keys) * len(ODD_VALUES) / 3


def on_native(path: Path, budget: int) -> ModelRunner:
    settings = {
        "backend": "native",
        "threads": 2,
        "kv_dtype": "f32",
        "max_model_len": 64,
        "activation_bits": "16",
    }
    return ModelRunner(path, resolve({**settings, "max_num_batched_tokens": budget}).config)


@pytest.mark.skipif(not library.available(), reason="the native library is not built")
@pytest.mark.parametrize("family", CONVERTED)
def test_native_serves(family: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, family)
    ids = random_ids(40)
    exact, error = oracle(model, ids)
    assert np.abs(on_native(path, 512).predict(ids) - exact).max() <= 32 * error


@pytest.mark.skipif(not library.available(), reason="the native library is not built")
@pytest.mark.parametrize("types", ["Q8_0", "Q4_1", "BF16", "MXFP4", "mixed"])
@pytest.mark.parametrize(
    "family", ["granite", "qwen3", "olmo2", "gemma2", "gemma3", "mixtral", "qwen3 moe", "gpt-oss"]
)
def test_native_serves_other_types(family: str, types: str, tmp_path: Path) -> None:
    """Activations are rounded to integers of 12 bits and more where weights are integers."""
    path, model = written(tmp_path, family, mixed if types == "mixed" else types)
    ids = random_ids(40)
    exact, _ = oracle(model, ids)
    whole = on_native(path, 512).predict(ids)
    assert np.abs(whole - exact).max() <= 6 * 2.0**-11 * np.abs(exact).max()
    assert np.array_equal(on_native(path, 7).predict(ids), whole)
