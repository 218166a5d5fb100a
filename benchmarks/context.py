"""Prefill and decode over a long context on a tiny model of one layer, and memory beside its bill.

One request of --tokens tokens is prefilled in chunks, then cut-off copies of it, which find their prefix in
the cache, decode at contexts up to that. With one small layer attention is most of the work, so the curves
show what it costs. Memory: what the process grew by, against the bill of the engine.

The last line of standard output is JSON. --plot writes a chart.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import random_llama
from octavo import ModelRunner, SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import bill_for
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniprocExecutor
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineRequest
from octavo.platforms import cpu
from octavo.scheduler.scheduler import Scheduler, SchedulerLimits

DECODED = 16
MIB = 1 << 20


def rss() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def steps(core: EngineCore, prompt: list[int], name: str, max_tokens: int) -> list[tuple[int, float]]:
    """Run one request; for each step, the tokens computed so far and its seconds."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    core.add(EngineRequest(request_id=name, prompt_ids=prompt, params=params))
    found = []
    while core.has_requests:
        request = core.scheduler.request(name)
        started = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - started
        assert request is not None
        found.append((request.num_computed_tokens, seconds))
    return found


def plot(path: Path, chunk: int, prefill: list[tuple[int, float]], decode: list[tuple[int, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    left.plot([n for n, _ in prefill], [chunk / s for _, s in prefill], linewidth=1.2)
    left.set(xlabel="context, tokens", ylabel="prefill, tokens a second", ylim=(0, None), xlim=(0, None))
    right.plot([n for n, _ in decode], [1e3 * s for _, s in decode], marker="o", markersize=3, linewidth=1.2)
    right.set(xlabel="context, tokens", ylabel="a decode step, ms", ylim=(0, None), xlim=(0, None))
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    chunk = 512
    with tempfile.TemporaryDirectory() as scratch:
        shape = random_llama.Shape(256, 768, 1, 4, 2, 4096, args.tokens)
        random_llama.write(Path(scratch), shape)
        config = resolve({"backend": args.backend, "max_num_seqs": 4, "kv_cache_gib": 0.04}).config
        before = rss()
        runner = ModelRunner(scratch, config)
        bill = bill_for(config, runner)
        runner.load(bill.num_blocks)
        kv = KVCacheManager(bill.num_blocks, runner.program.kv_groups, step_tokens=chunk)
        core = EngineCore(Scheduler(SchedulerLimits(chunk, 4), kv), UniprocExecutor(runner))
        prompt = np.random.default_rng(0).integers(0, shape.vocab_size, args.tokens - DECODED).tolist()
        # The last chunk may be smaller, and samples.
        prefill = steps(core, prompt, "prefill", 1)[: len(prompt) // chunk]
        contexts = [c for c in (1024, 2048, 4096, 8192, 12288, 16384, 24576) if c < len(prompt)] + [
            len(prompt)
        ]
        decode = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for context in progress.track(contexts, description="decoding"):
                times = [s for _, s in steps(core, prompt[:context], f"at {context}", DECODED)[1:]]
                decode.append((context, statistics.median(times)))
        grown = rss() - before
        core.close()
    billed = bill.total - bill.reserve
    table = Table("context", "prefill tokens/s", "decode step, ms", "decode tokens/s")
    by_context = {n: chunk / s for n, s in prefill}
    for context, seconds in decode:
        near = min(by_context, key=lambda n: abs(n - context))
        table.add_row(f"{context}", f"{by_context[near]:.0f}", f"{1e3 * seconds:.2f}", f"{1 / seconds:.0f}")
    console = Console(stderr=True)
    console.print(table)
    console.print(f"memory: billed {billed / MIB:.1f} MiB, the process grew by {grown / MIB:.1f} MiB")
    if args.plot:
        plot(args.plot, chunk, prefill, decode)
    result = {
        "benchmark": "context",
        "cpu": cpu.name(),
        "threads": cpu.num_threads(),
        "python": platform.python_version(),
        "backend": runner.backend.name,
        "tokens": args.tokens,
        "prefill_seconds": round(sum(s for _, s in prefill), 2),
        "prefill_tokens_per_s": {n: round(v, 1) for n, v in list(by_context.items())[7::8]},
        "decode_ms": {context: round(1e3 * seconds, 3) for context, seconds in decode},
        "billed_mib": round(billed / MIB, 1),
        "grown_mib": round(grown / MIB, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
