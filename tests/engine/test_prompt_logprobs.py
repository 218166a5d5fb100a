"""Logprobs of a prompt: `predict`'s, whatever the chunks, the load and the preemptions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo import LLM, ModelRunner, SamplingParams
from octavo.config.resolve import resolve
from octavo.errors import InvalidRequestError
from octavo.messages import SchedulerOutput, TokenLogprobs
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.sampling.logprobs import prompt_logprobs, token_logprobs
from octavo.scheduler.scheduler import Scheduler
from tiny_models import NUM_TOKENS

CONTEXT = 256
WAYS: list[dict[str, Any]] = [
    {"max_num_seqs": 1},  # one row of logits in a step
    {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    {"max_num_seqs": 32, "max_num_batched_tokens": 16, "prefix_caching": False},
    {"max_num_seqs": 32},
]


def make_llm(path: Path, **settings: Any) -> LLM:
    return LLM(str(path), **{"threads": 1, "max_model_len": CONTEXT, "backend": "torch", **settings})


def random_ids(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, NUM_TOKENS - 3, length).tolist()
    return ids


#: Each two share blocks.
PROMPTS = [random_ids(40, seed // 2) + random_ids(length, seed) for seed, length in enumerate((1, 60, 17, 3))]


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[list[TokenLogprobs]]:
    """Of each prompt, from the logits that the runner computes without an engine."""
    settings = {"threads": 1, "max_model_len": CONTEXT, "backend": "torch"}
    runner = ModelRunner(tiny_path, resolve(settings).config)
    logits = [runner.predict([prompt])[0] for prompt in PROMPTS]
    return [reference(prompt, rows) for prompt, rows in zip(PROMPTS, logits, strict=True)]


def reference(prompt: list[int], logits: npt.NDArray[np.float32]) -> list[TokenLogprobs]:
    return [token_logprobs(row, token, 2) for row, token in zip(logits, prompt[1:], strict=False)]


def ask(llm: LLM, *, max_tokens: int = 3) -> list[RequestOutput]:
    params = SamplingParams(prompt_logprobs=2, max_tokens=max_tokens, seed=1)
    plain = SamplingParams(max_tokens=20, seed=2, ignore_eos=True)
    outputs = llm.generate(
        [*PROMPTS, PROMPTS[0], PROMPTS[1]], [params] * len(PROMPTS) + [plain] * 2, progress=False
    )
    assert [output.prompt_logprobs for output in outputs[len(PROMPTS) :]] == [None, None]
    return outputs[: len(PROMPTS)]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_any_chunks_and_company(
    tiny_path: Path, expected: list[list[TokenLogprobs]], settings: dict[str, Any]
) -> None:
    with make_llm(tiny_path, **settings) as llm:
        for max_tokens in (3, 0):
            outputs = ask(llm, max_tokens=max_tokens)  # the second time all is cached
            assert [output.prompt_logprobs for output in outputs] == expected
            assert {output.cached_tokens for output in outputs} == {0}
            assert {len(output.token_ids) for output in outputs} <= {max_tokens, 1, 2}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted(
    tiny_path: Path,
    expected: list[list[TokenLogprobs]],
    prefix_caching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, victims = random.Random(1), []
    schedule = Scheduler.schedule

    def with_preemptions(self: Scheduler) -> SchedulerOutput | None:
        if self._running and rng.random() < 0.3:
            victims.append(rng.choice(self._running))
            self._preempt(victims[-1])
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", with_preemptions)
    settings = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "prefix_caching": prefix_caching}
    with make_llm(tiny_path, **settings) as llm:
        assert [output.prompt_logprobs for output in ask(llm)] == expected
    assert len(victims) > 3


def test_nothing_is_sampled_with_max_tokens_0(tiny_path: Path) -> None:
    with make_llm(tiny_path) as llm:
        whole = llm.generate(random_ids(CONTEXT, 5), SamplingParams(max_tokens=0), progress=False)[0]
        assert (whole.text, whole.token_ids) == ("", [])
        assert (whole.finish_reason, whole.prompt_logprobs) == (FinishReason.LENGTH, None)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        assert llm.generate([7], params, progress=False)[0].prompt_logprobs == []
        (only,) = llm.stream([7, 8], params)
        assert [entry.token_id for entry in only.prompt_logprobs or []] == [8]


def test_logits_that_are_no_numbers_end_the_request() -> None:
    rows = np.zeros((3, 10), np.float32)
    rows[1, 4] = np.nan
    found = prompt_logprobs("r", 5, [1, 2, 3], iter(rows), 0)
    assert found.error is not None
    assert found.error.startswith("the model's logits before position 6 of the prompt are not all numbers")


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with make_llm(tiny_path) as llm:
        yield llm


def test_min_tokens(llm: LLM) -> None:
    """Every token of the vocabulary but one is a stop, or ends the text, as soon as it may."""
    prompt = random_ids(20, 9)
    free = llm.generate(prompt, SamplingParams(seed=3, max_tokens=30), progress=False)[0]
    letters = free.text[6:8]
    for stop in ({"stop": letters}, {"stop_token_ids": tuple(range(64))}):
        for count in (0, 1, 12, 30):
            params = SamplingParams(seed=3, max_tokens=30, min_tokens=count, **stop)
            output = llm.generate(prompt, params, progress=False)[0]
            assert len(output.token_ids) >= count
            again = llm.generate(prompt, params, progress=False)[0]
            assert (again.text, again.token_ids) == (output.text, output.token_ids)
    with pytest.raises(InvalidRequestError, match="min_tokens is 500, but there can be no more than 236"):
        llm.generate(prompt, SamplingParams(min_tokens=500), progress=False)


def test_special_tokens_are_shown_on_demand(llm: LLM) -> None:
    special = NUM_TOKENS - 2
    fields: dict[str, Any] = {"logit_bias": {special: 100}, "max_tokens": 2, "temperature": 0}
    assert llm.generate([1], SamplingParams(**fields), progress=False)[0].text == ""
    params = SamplingParams(**fields, skip_special_tokens=False)
    assert llm.generate([1], params, progress=False)[0].text == "<|im_start|><|im_start|>"
    params = SamplingParams(**fields, skip_special_tokens=False, stop="start|><")
    assert llm.generate([1], params, progress=False)[0].text == "<|im_"
