"""Records the logits of every sampled row, so that runs can be compared bit by bit.

A run's trace maps (prompt, position) to a digest of the whole row of logits; equal traces mean that the
model computed the same bits at every step, not merely that the same tokens won.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.messages import SampledToken
from octavo.outputs import RequestOutput
from octavo.runner import model_runner
from octavo.sampling.choice import Choose, LogitsRows
from octavo.sampling.sampler import SamplingRow, sample

VOCAB = 49152
OUTPUT = 6
#: Longest sequence in these tests, in tokens, and KV blocks.
MODEL_LEN, BLOCKS = 640, 40
#: 1..600 tokens: block, tile and chunk edges first, then at random.
EDGES = [1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 600]


def make_prompts(count: int, longest: int = 600) -> list[list[int]]:
    """`count` prompts; every third begins like the one before, so that prefixes are shared."""
    rng = random.Random(20261201)
    lengths = [n for n in EDGES if n <= longest]
    lengths = lengths[:: max(1, len(lengths) // count)][:count]
    while len(lengths) < count:
        lengths.append(min(longest, round(600 ** rng.random())))
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        start = prompts[-1][: length // 2] if i % 3 == 2 else []
        prompts.append(start + [rng.randrange(VOCAB) for _ in range(length - len(start))])
    return prompts


def make_params(count: int) -> list[SamplingParams]:
    """Greedy, sampled, and sampled with penalties, in turn."""
    kinds = [
        SamplingParams(temperature=0, max_tokens=OUTPUT, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=OUTPUT, ignore_eos=True),
        SamplingParams(
            temperature=0.8, top_k=50, seed=11, repetition_penalty=1.2, frequency_penalty=0.3,
            max_tokens=OUTPUT, logprobs=0, ignore_eos=True,
        ),
    ]  # fmt: skip
    return [kinds[i % len(kinds)] for i in range(count)]


@dataclass
class Trace:
    """What a run computed, by prompt."""

    rows: dict[tuple[int, int], str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    cached_tokens: int = 0

    def differences(self, other: Trace, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Prompts whose bits, tokens or logprobs differ."""
        found = []
        for i, prompt in enumerate(prompts):
            at = [p for (j, p), digest in self.rows.items() if j == i and other.rows.get((j, p)) != digest]
            same = self.token_ids[i] == other.token_ids[i] and self.logprobs[i] == other.logprobs[i]
            if at or not same:
                found.append(f"prompt {i} of {len(prompt)} tokens: logits differ at {sorted(at)}")
        return found


@contextmanager
def _recorded(digests: dict[tuple[str, int], str]) -> Iterator[None]:
    def recording_sample(
        logits: LogitsRows, rows: Sequence[SamplingRow], positions: Sequence[int], choose: Choose
    ) -> list[SampledToken]:
        for values, row, position in zip(logits, rows, positions, strict=True):
            key, digest = (row.request_id, position), hashlib.sha256(values.tobytes()).hexdigest()
            assert digests.setdefault(key, digest) == digest, f"{key} was computed twice with other bits"
        return sample(logits, rows, positions, choose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "sample", recording_sample)
        yield


def run(llm: LLM, prompts: list[list[int]], *, order: Sequence[int] | None = None) -> Trace:
    """Generate for all prompts together, in this order of arrival."""
    order = range(len(prompts)) if order is None else order
    params = make_params(len(prompts))
    digests: dict[tuple[str, int], str] = {}
    with _recorded(digests):
        outputs = llm.generate([prompts[i] for i in order], [params[i] for i in order], progress=False)
    return _trace(order, outputs, digests)


def _trace(order: Sequence[int], outputs: list[RequestOutput], digests: dict[tuple[str, int], str]) -> Trace:
    trace = Trace(cached_tokens=sum(output.cached_tokens for output in outputs))
    places = {output.request_id: i for i, output in zip(order, outputs, strict=True)}
    trace.rows = {(places[request_id], position): d for (request_id, position), d in digests.items()}
    for output in outputs:
        i = places[output.request_id]
        assert len(output.token_ids) == OUTPUT
        trace.token_ids[i] = output.token_ids
        trace.logprobs[i] = output.logprobs
    return trace
