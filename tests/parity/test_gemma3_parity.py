"""Gemma 3 270M, as llama.cpp converts and quantises it, against `transformers`.

The oracle is built from the published hyperparameters and the file's weights, dequantised to float32. Most
of them are held as they are; those of Q4_K and Q6_K are rounded to q8. So there are two oracles: with the
weights as held, which logits equal up to float32's rounding, and with the file's own, from which they differ
by no more than the weights do. The 64 greedy tokens are those of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo import LLM, ModelRunner, SamplingParams
from octavo.backends.torch.backend import TorchBackend
from octavo.config.resolve import resolve
from octavo.input.tokenizer import Tokenizer
from octavo.quantization.conversion import convert
from octavo.quantization.formats import NATIVE_TYPES, STORED_TYPES
from octavo.quantization.packing import unpack_groups
from octavo.weights.gguf import GGUFFile

NEW_TOKENS = 64
QUESTION = "What is the capital of France?"
STORY = "Once upon a time, in a small village by a river,"
#: google/gemma-3-270m's config.json.
PUBLISHED = {
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def file(gemma3_path: Path) -> Iterator[GGUFFile]:
    with GGUFFile.open(gemma3_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def hf() -> Any:
    """The oracle, without weights yet."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = Gemma3ForCausalLM(Gemma3TextConfig(**PUBLISHED)).eval()
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def own(file: GGUFFile, hf: Any) -> Weights:
    """The file's weights, under their names in `transformers`."""
    return {name: torch.from_numpy(file.dequantize(of) - offset) for name, of, offset in stored(hf)}


@pytest.fixture(scope="module")
def held(file: GGUFFile, hf: Any, own: Weights) -> Weights:
    """The weights as Octavo keeps them."""
    weights = dict(own)
    for name, of, _ in stored(hf):
        type_name = file.tensors[of].type_name
        if not STORED_TYPES[type_name].lossless:
            format_ = STORED_TYPES[type_name].format
            groups = unpack_groups(NATIVE_TYPES[format_], convert(file.raw(of), type_name, format_))
            weights[name] = torch.from_numpy(groups.values())
    return weights


def stored(hf: Any) -> Iterator[tuple[str, str, np.float32]]:
    """Each parameter's name, the file's for it, and what the converter added to it."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, PUBLISHED["num_hidden_layers"])
    for name, _ in hf.named_parameters():
        yield name, names.get_name(name, (".weight",)), np.float32(name.endswith("norm.weight"))


def use(hf: Any, weights: Weights) -> None:
    hf.load_state_dict(weights, strict=False, assign=True)
    hf.tie_weights()


def logits(hf: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits[0].numpy()


def test_it_answers_a_question(gemma3_path: Path) -> None:
    """As plain text: it is a base model, with no chat template."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(gemma3_path), max_model_len=64, kv_cache_gib=0.1) as llm:
        (output,) = llm.generate(QUESTION, params, progress=False)
    assert "Paris" in output.text


@pytest.mark.parametrize(
    "prompt", [QUESTION, pytest.param(STORY, marks=pytest.mark.slow)], ids=["question", "story"]
)
def test_greedy_tokens_and_logits_equal_transformers(
    prompt: str, gemma3_path: Path, hf: Any, own: Weights, held: Weights, file: GGUFFile
) -> None:
    """Tokens are compared on the oracle's own text: if each is the likeliest after those before it, so are
    they all when generated. That decoding has the bits of a prefill is tests/exactness' business."""
    ids = Tokenizer.from_gguf(file.metadata).encode(prompt)
    use(hf, held)
    text = generate(hf, ids)
    expected = logits(hf, text)
    exact = logits(torch.nn.Module.double(hf), text)
    use(torch.nn.Module.float(hf), own)
    stored = logits(hf, text)
    settings = {"max_model_len": 128, "max_num_seqs": 128, "threads": 2}
    runner = ModelRunner(gemma3_path, resolve(settings).config, backend=TorchBackend())
    found = runner.predict([text])[0]
    runner.close()
    for each in (expected, stored, found):
        assert each[len(ids) - 1 : -1].argmax(axis=1).tolist() == text[len(ids) :]
    assert len(text) == len(ids) + NEW_TOKENS
    unit = np.abs(expected - exact).max()
    print(f"max |logits - float64|: transformers {unit:.2e}, torch backend {np.abs(found - exact).max():.2e}")
    assert np.abs(found - exact).max() <= 4 * unit
    assert np.linalg.norm(found - stored) < moved(own, held) * np.linalg.norm(stored)


def test_what_rounding_changes(file: GGUFFile, own: Weights, held: Weights) -> None:
    """Matrices of Q4_K and Q6_K only. A weight moves by 1/254 of its group's largest, which is no larger
    than the group's norm: of 32, and so of all, at most sqrt(32) / 254 in norm."""
    rounded = [name for name in own if held[name] is not own[name]]
    assert len(rounded) == sum(info.type_name in ("Q4_K", "Q6_K") for info in file.tensors.values())
    for name in rounded:
        assert 0 < float((held[name] - own[name]).norm() / own[name].norm()) < 32**0.5 / 254


def generate(hf: Any, prompt: list[int]) -> list[int]:
    """The prompt and 64 greedy tokens."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens: list[int] = out[0].tolist()
    return tokens


def moved(own: Weights, held: Weights) -> float:
    """The sum of what rounding changed of each matrix, in norm and of its size."""
    return sum(float((held[name] - own[name]).norm() / own[name].norm()) for name in own)
