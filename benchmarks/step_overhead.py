"""What a step costs beside the model: scheduling, inputs, sampling and text, in this process.

Decodes on the default model at several batch sizes: greedily, or as --temperature, --top-k, --top-p and
--min-p say. Each number is the median over steps in which every request was given one token. "native" is the
call that computes the logits; "overhead" is the step without it. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo import SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import build_core, input_processor
from octavo.output.output_processor import OutputProcessor
from octavo.platforms import cpu
from octavo.runner.model_runner import ModelRunner

MODEL = "smollm2-135m-instruct"
BATCHES = (1, 8, 32)
PROMPT = 32
TOP = 25  # functions of a profile that are shown


class Stopwatch:
    """Milliseconds by phase of the step under way."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its time added to a phase."""

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent = (time.perf_counter() - started) * 1e3
                self.phases[phase] = self.phases.get(phase, 0.0) + spent

        return call

    def wrap(self, owner: object, method: str, phase: str) -> None:
        """Time a method of one object."""
        setattr(owner, method, self.timed(phase, getattr(owner, method)))


class Bench:
    """An engine whose phases are timed."""

    def __init__(self, backend: str, params: dict[str, Any]) -> None:
        self._params = params
        self._watch = watch = Stopwatch()
        config = resolve({"model": MODEL, "max_model_len": 2048, "backend": backend}).config
        runners: list[ModelRunner] = []
        self._core, _ = build_core(config, before_loading=runners.append)
        (runner,) = runners
        self._inputs = input_processor(config, runner)
        self._outputs = OutputProcessor(self._inputs.tokenizer)
        self._watch.wrap(runner.backend, "run", "native")
        self._watch.wrap(runner, "execute", "execute")
        self._watch.wrap(runner, "sample", "sample")
        self._watch.wrap(self._core.scheduler, "schedule", "schedule")
        self._watch.wrap(self._core.scheduler, "update", "update")
        self._step = watch.timed("core", self._core.step)
        self._process = watch.timed("output", self._outputs.process)
        self._count = 0

    def run(self, batch: int, steps: int, profile: cProfile.Profile | None = None) -> list[dict[str, float]]:
        """Milliseconds by phase of each step that decoded for all requests of a batch."""
        for i in range(batch):
            self._count += 1
            params = SamplingParams(max_tokens=steps + 1, ignore_eos=True, **self._params)
            prompt = [1000 + 37 * i + j for j in range(PROMPT)]
            request = self._inputs.process(
                prompt, params, request_id=f"request-{self._count}", arrival=time.monotonic()
            )
            self._outputs.add(request)
            self._core.add(request)
        self._process(self._core.step())
        found = []
        if profile is not None:
            profile.enable()
        while self._core.has_requests:
            self._watch.phases.clear()
            self._process(self._step())
            found.append(_split(dict(self._watch.phases)))
        if profile is not None:
            profile.disable()
        return found

    def close(self) -> None:
        self._core.close()


def _split(phases: dict[str, float]) -> dict[str, float]:
    """From nested times to times side by side."""
    native = phases["native"]
    named = {
        "schedule": phases["schedule"],
        "prepare": phases["execute"] - native,
        "native": native,
        "sample": phases["sample"],
        "update": phases["update"],
        "output": phases["output"],
    }
    total = phases["core"] + phases["output"]
    return {**named, "other": total - sum(named.values()), "overhead": total - native}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--profile", action="store_true", help="print where the largest batch's time goes")
    args = parser.parse_args()
    names = ("temperature", "top_k", "top_p", "min_p", "logprobs")
    params = {name: getattr(args, name) for name in names}
    bench = Bench(args.backend, params | {"seed": 1})
    console = Console(stderr=True)
    measured: dict[int, list[dict[str, float]]] = {batch: [] for batch in BATCHES}
    for _ in range(args.repeats):  # interleaved, so that a noisy neighbour hits all sizes
        for batch, steps in measured.items():
            steps += bench.run(batch, args.steps)
    if args.profile:
        profile = cProfile.Profile()
        bench.run(BATCHES[-1], args.steps, profile)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(TOP)
    bench.close()
    rows = [
        {"batch": batch, **{name: round(statistics.median(s[name] for s in steps), 3) for name in steps[0]}}
        for batch, steps in measured.items()
    ]
    table = Table(*rows[0], title="milliseconds a step")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    result = {
        "benchmark": "step_overhead",
        "cpu": cpu.name(),
        "threads": cpu.num_threads(),
        "python": platform.python_version(),
        "model": MODEL,
        "backend": args.backend,
        "sampling": params,
        "steps": args.steps,
        "repeats": args.repeats,
        "batches": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
