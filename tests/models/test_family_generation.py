"""Every family through the engine: greedy tokens are those of transformers, and the same bits in a batch, in
chunks, with a warm cache and with too few blocks.

The oracle is transformers' float64 model, run on the whole sequence for each token: no cache, no batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import FAMILIES, VOCAB, make_model
from octavo.config.resolve import resolve
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniprocExecutor
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineRequest, TokenLogprobs
from octavo.runner.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

NEW_TOKENS = 8
#: Around a window of 8, a block of 16 and, with the new tokens, the original context of 32 of longrope.
LENGTHS = (5, 9, 20, 27, 40)
Answer = tuple[list[int], list[TokenLogprobs]]


def prompts() -> list[list[int]]:
    """One of each length; the last begins like the one before it."""
    rng = np.random.default_rng(1)
    made = [rng.integers(3, VOCAB, length).tolist() for length in LENGTHS]
    made[-1][:20] = made[-2][:20]
    return made


def expected(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generate(
    path: Path, asked: list[list[int]], *, budget: int, num_blocks: int = 200, backend: str = "torch"
) -> list[Answer]:
    """Answers of all prompts, which come together."""
    settings = {"backend": backend, "threads": 1, "max_model_len": 64, "max_num_batched_tokens": budget}
    config = resolve({**settings, "kv_dtype": "f32", "max_num_seqs": 5}).config
    runner = ModelRunner(path, config)
    runner.load(num_blocks)
    kv = KVCacheManager(num_blocks, runner.program.kv_groups, step_tokens=budget)
    boundary = runner.program.rope_boundary
    core = EngineCore(
        Scheduler(SchedulerLimits(budget, 5), kv, rope_boundary=boundary), UniprocExecutor(runner)
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2)
    for i, prompt in enumerate(asked):
        core.add(EngineRequest(request_id=str(i), prompt_ids=prompt, params=params))
    answers: list[Answer] = [([], []) for _ in asked]
    while core.has_requests:
        for output in core.step():
            assert output.error is None
            ids, logprobs = answers[int(output.request_id)]
            ids += output.new_token_ids
            logprobs += output.logprobs or []
        core.scheduler.check_integrity()
    runner.close()
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers_whatever_the_load(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    model = model.double()
    asked = prompts()
    alone = [generate(tmp_path, [prompt], budget=64)[0] for prompt in asked]
    assert [ids for ids, _ in alone] == [expected(model, prompt) for prompt in asked]
    assert generate(tmp_path, asked, budget=64) == alone
    assert generate(tmp_path, asked, budget=7) == alone
    enough_for_one = len(ModelRunner(tmp_path, resolve({"backend": "torch"}).config).program.kv_groups) * 4
    assert generate(tmp_path, asked, budget=16, num_blocks=enough_for_one + 2) == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_native_gives_the_same_tokens(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    asked = prompts()
    alone = [generate(tmp_path, [prompt], budget=64, backend="native")[0] for prompt in asked]
    assert [ids for ids, _ in alone] == [expected(model.double(), prompt) for prompt in asked]
    assert generate(tmp_path, asked, budget=7, backend="native") == alone
