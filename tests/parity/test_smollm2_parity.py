"""A real model against `transformers`, and the backends against each other.

Tolerances are derived, not chosen: `transformers` is run in float64 too, and its own float32 error on the
same input is the unit. Where activations are quantised a rounding can flip an integer, so there the unit
is how far the reference moves when its residual stream is moved by an ulp or two.
"""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, EngineConfig, ModelRunner, SamplingParams
from octavo.backends.torch.backend import TorchBackend
from octavo.input.tokenizer import Tokenizer
from octavo.program.ir import Embedding
from octavo.program.planner import seal

NEW_TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity to a child.",
    "List three prime numbers and say why they are prime.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "def fibonacci(n):",
    "Give me a recipe for pancakes.",
    "What is 17 + 25?",
    "Summarise the plot of Cinderella in two sentences.",
    "Name the planets of the solar system in order.",
    "Why is the sky blue?",
    "Write a short letter to a friend who moved away.",
    "What does HTTP stand for?",
    "How do vaccines work?",
    "Describe the taste of a lemon.",
    "Tell me a joke about a cat.",
    "What is the difference between a list and a tuple in Python?",
    "Once upon a time, in a small village by a river,",
    "Continue: 1, 1, 2, 3, 5, 8,",
]


@pytest.fixture(scope="module")
def hf(smollm2_path: Path) -> Any:
    """The same GGUF, dequantised by transformers to float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its loader's own
        model = AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="module")
def prompts(smollm2_tokenizer: Tokenizer) -> list[list[int]]:
    text = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [smollm2_tokenizer.encode(text.format(prompt)) for prompt in PROMPTS]


def runner(path: Path, **options: Any) -> ModelRunner:
    made = ModelRunner(path, EngineConfig(max_model_len=1024, max_num_seqs=256), **options)
    made.load(64)
    return made


def hf_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def test_greedy_tokens_equal_transformers(hf: Any, prompts: list[list[int]], smollm2_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(smollm2_path), backend="torch", max_model_len=256, kv_cache_gib=0.5) as llm:
        ours = [output.token_ids for output in llm.generate(prompts, params, progress=False)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            theirs = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert tokens == theirs[0, len(prompt) :].tolist(), prompt


def test_torch_logits_are_as_exact_as_transformers(
    hf: Any, prompts: list[list[int]], smollm2_path: Path
) -> None:
    """Against float64, the reference backend errs by no more than 2x what transformers in float32 does."""
    ours = runner(smollm2_path, backend=TorchBackend())
    texts = [list(chain(*prompts[:12])), *prompts[12:15]]
    single = [hf_logits(hf, ids) for ids in texts]
    torch.nn.Module.double(hf)
    exact = [hf_logits(hf, ids) for ids in texts]
    torch.nn.Module.float(hf)  # transformers' own refuses for a model that came from a GGUF
    unit = max(float(np.abs(s - e).max()) for s, e in zip(single, exact, strict=True))
    error = max(float(np.abs(ours.predict([ids])[0] - e).max()) for ids, e in zip(texts, exact, strict=True))
    print(f"max |logits - float64|: transformers {unit:.2e}, torch backend {error:.2e}")
    assert error <= 2 * unit


def test_native_equals_torch_in_the_same_arithmetic(prompts: list[list[int]], smollm2_path: Path) -> None:
    """Both quantise activations alike, so they differ by rounding: by no more, in the root mean square of
    each row, than 4x what the reference itself moves when its residual stream moves by 2**-22."""
    config = EngineConfig(max_model_len=1024, max_num_seqs=256, kv_dtype="f16")
    reference = ModelRunner(smollm2_path, config, backend=TorchBackend(quantized=True))
    reference.load(64)
    nudged = ModelRunner(smollm2_path, config, backend=TorchBackend(quantized=True))
    nudge(nudged)
    nudged.load(64)
    native = ModelRunner(smollm2_path, dataclasses.replace(config, backend="native"))
    native.load(64)
    ids = list(chain(*prompts[:4]))[:96]
    base = reference.predict([ids])[0]
    unit = np.sqrt(((nudged.predict([ids])[0] - base) ** 2).mean())
    error = np.sqrt(((native.predict([ids])[0] - base) ** 2).mean())
    print(f"rms difference: native {error:.2e}, nudged reference {unit:.2e}; logits' rms {base.std():.2f}")
    assert 0 < unit < 0.5
    assert error <= 4 * unit


def nudge(target: ModelRunner) -> None:
    """Scale the embeddings by 1 + 2**-22: a change of a unit or two in the last place."""
    first = target.program.ops[0]
    assert isinstance(first, Embedding)
    ops = (dataclasses.replace(first, scale=1 + 2.0**-22), *target.program.ops[1:])
    target.program = dataclasses.replace(target.program, ops=ops)
    target.sealed = seal(target.program, target.sealed.limits, target.backend.table)


def test_perplexity_of_the_native_backend(hf: Any, smollm2_path: Path, smollm2_tokenizer: Tokenizer) -> None:
    """On 20,480 tokens of Python's own documentation, within 0.5% of float32."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    window, count = 512, 20480
    ids = smollm2_tokenizer.encode(text)[:count]
    assert len(ids) == count
    native = runner(smollm2_path)
    assert native.backend.name == "native"
    losses = {"native": 0.0, "float32": 0.0}
    for start in range(0, count, window):
        piece = ids[start : start + window]
        losses["native"] += negative_log_likelihood(native.predict([piece])[0], piece)
        losses["float32"] += negative_log_likelihood(hf_logits(hf, piece), piece)
    scored = count - count // window
    native_ppl, float_ppl = (float(np.exp(loss / scored)) for loss in losses.values())
    print(f"perplexity on {scored} tokens: native {native_ppl:.4f}, float32 {float_ppl:.4f}")
    assert abs(native_ppl / float_ppl - 1) < 0.005


def negative_log_likelihood(logits: np.ndarray, ids: list[int]) -> float:
    """The sum over all tokens but the first."""
    log_probs = torch.log_softmax(torch.from_numpy(logits[:-1]), dim=-1)
    return -float(log_probs.gather(1, torch.tensor(ids[1:])[:, None]).double().sum())
