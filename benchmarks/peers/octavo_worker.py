"""Octavo's engine core in its process: scheduler, runner and sampling, without text and HTTP."""

from __future__ import annotations

import time
from typing import Any

import worker

import octavo
from octavo import SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import build_core
from octavo.messages import EngineRequest

_SLACK = 16  # tokens that the first sequences get while the prompts of the last are computed


class Octavo:
    """An engine core, stepped by hand."""

    def __init__(self, path: str, threads: int, activation_bits: str) -> None:
        settings = {
            "model": path,
            "backend": "native",
            "threads": threads,
            "activation_bits": activation_bits,
            "max_model_len": 1024,
            "max_num_seqs": worker.MAX_BATCH,
            "max_num_batched_tokens": worker.MAX_PREFILL,
            "kv_cache_gib": 0.25,
        }
        self._core, self._info = build_core(resolve(settings).config)
        self._activation_bits = activation_bits
        self._count = 0

    def about(self) -> dict[str, Any]:
        """Versions and settings."""
        return {
            "version": f"octavo {octavo.__version__}",
            "isa": self._info.isa,
            "weights": self._info.weight_formats,
            "activation_bits": self._activation_bits,
            "kv": str(self._info.kv_dtype),
        }

    def prefill(self, tokens: int) -> float:
        """Seconds to the first new token of a prompt, which is another one each time: no prefix is cached."""
        self._count += 1
        self._add(worker.MAX_BATCH + self._count, tokens, 1)
        started = time.perf_counter()
        while self._core.has_requests:
            self._core.step()
        return time.perf_counter() - started

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of `steps` new tokens of each sequence."""
        names = {self._add(seed, worker.PROMPT, steps + _SLACK) for seed in range(batch)}
        begun: set[str] = set()
        while begun < names:
            begun |= {output.request_id for output in self._core.step() if output.new_token_ids}
        started = time.perf_counter()
        for _ in range(steps):
            tokens = sum(len(output.new_token_ids) for output in self._core.step())
            assert tokens == batch, f"a step of {batch} sequences made {tokens} tokens"
        seconds = time.perf_counter() - started
        for name in names:
            self._core.abort(name)
        return seconds

    def _add(self, seed: int, length: int, max_tokens: int) -> str:
        self._count += 1
        name = f"{self._count}"
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        ids = worker.prompt(seed, length, self._info.vocab_size)
        self._core.add(EngineRequest(request_id=name, prompt_ids=ids, params=params))
        return name


if __name__ == "__main__":
    parser = worker.parser(__doc__)
    parser.add_argument("--activation-bits", default="16")
    args = parser.parse_args()
    worker.serve(lambda: Octavo(args.model, args.threads, args.activation_bits))
