"""Static, request-level dynamic and continuous batching of the same requests on the same engine.

    static      batches of --batch requests, prompts padded to the longest of the batch, every request
                decoded to the longest output of the batch; nobody leaves early
    dynamic     batches of --batch requests, unpadded; who ends leaves, but nobody joins
    continuous  what Octavo does: at most --batch requests at once, and each that ends makes room

Reported for each: useful tokens a second, padding waste (computed tokens that nobody asked for) and KV
waste: 1 - used / allocated bytes of KV, averaged over time. KV counts as used where it belongs to a
token of the request, and as allocated where it is in a block that the request holds.

The last line of standard output is JSON. --plot writes a chart.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo import EngineConfig, SamplingParams
from octavo.config.resolve import resolve
from octavo.engine.build import Engine, build_engine
from octavo.messages import EngineRequest
from octavo.platforms import cpu
from octavo.program.ir import BLOCK_SIZE

PAD = 0


@dataclass(frozen=True)
class Job:
    """A request: prompt ids and how many tokens it wants."""

    prompt: list[int]
    output: int

    @property
    def total(self) -> int:
        return len(self.prompt) + self.output


@dataclass
class Ledger:
    """What a policy spent, second by second."""

    seconds: float = 0.0
    computed: int = 0
    used_time: float = 0.0  # integral over time of used KV tokens
    allocated_time: float = 0.0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # time, running, used tokens

    def kv_waste(self) -> float:
        return 1 - self.used_time / self.allocated_time


def make_jobs(rng: random.Random, count: int, vocab: int) -> list[Job]:
    """Prompts of 96..800 tokens and outputs of 24..256, both log-uniform: few are long."""

    def log_uniform(low: int, high: int) -> int:
        return round(low * (high / low) ** rng.random())

    return [
        Job([rng.randrange(vocab) for _ in range(log_uniform(96, 800))], log_uniform(24, 256))
        for _ in range(count)
    ]


def run_batch(engine: Engine, jobs: list[Job], padded: list[Job], ledger: Ledger, done: Progress) -> None:
    """Submit the padded form of jobs together and step until all ended."""
    core = engine.core
    scheduler = core.scheduler
    wanted = {}
    for i, (job, form) in enumerate(zip(jobs, padded, strict=True)):
        request_id = f"{ledger.seconds}-{i}"
        wanted[request_id] = job
        core.add(
            EngineRequest(
                request_id=request_id,
                prompt_ids=form.prompt,
                params=SamplingParams(temperature=0, max_tokens=form.output, seed=0),
            )
        )
    started = time.perf_counter() - ledger.seconds
    while core.has_requests:
        core.step()
        now = time.perf_counter() - started
        passed, ledger.seconds = now - ledger.seconds, now
        used = allocated = running = 0
        for request_id, job in wanted.items():
            request = scheduler.request(request_id)
            if request is None or not scheduler.kv.num_held(request):
                continue
            running += 1
            # Padding goes before the prompt, so the first `pad` positions are nobody's.
            pad = len(request.prompt_ids) - len(job.prompt)
            used += max(0, min(request.num_computed_tokens - pad, job.total))
            allocated += scheduler.kv.num_held(request) * BLOCK_SIZE
        ledger.used_time += used * passed
        ledger.allocated_time += allocated * passed
        ledger.timeline.append((now, running, used))
    for form in padded:
        ledger.computed += form.total - 1  # the last token is sampled and never computed
        done.advance(done.task_ids[0], 1)


def static(batch: list[Job]) -> list[Job]:
    prompt, output = max(len(j.prompt) for j in batch), max(j.output for j in batch)
    return [Job([PAD] * (prompt - len(j.prompt)) + j.prompt, output) for j in batch]


def run_policy(name: str, engine: Engine, jobs: list[Job], size: int, done: Progress) -> Ledger:
    ledger = Ledger()
    step = len(jobs) if name == "continuous" else size
    for start in range(0, len(jobs), step):
        batch = jobs[start : start + step]
        run_batch(engine, batch, static(batch) if name == "static" else batch, ledger, done)
    return ledger


def report(name: str, jobs: list[Job], ledgers: list[Ledger]) -> dict[str, float | str]:
    useful = sum(job.total - 1 for job in jobs)
    outputs = sum(job.output for job in jobs)
    seconds = statistics.median(ledger.seconds for ledger in ledgers)
    return {
        "policy": name,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(useful / seconds, 1),
        "output_tokens_per_s": round(outputs / seconds, 1),
        "padding_waste": round(1 - useful / ledgers[0].computed, 4),
        "kv_waste": round(statistics.median(ledger.kv_waste() for ledger in ledgers), 4),
    }


def plot(path: Path, ledgers: dict[str, Ledger], rows: list[dict[str, float | str]], title: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained")
    for name, ledger in ledgers.items():
        times, running, _ = zip(*ledger.timeline, strict=True)
        left.step(times, running, where="pre", label=name, linewidth=1.2)
    left.set(xlabel="seconds", ylabel="requests in the batch", ylim=(0, None), xlim=(0, None))
    left.legend(frameon=False)
    names = [str(row["policy"]) for row in rows]
    right.barh(names, [float(row["tokens_per_s"]) for row in rows], color=["C0", "C1", "C2"])
    right.invert_yaxis()
    right.set(xlabel="useful tokens a second")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    console = Console(stderr=True)
    config: EngineConfig = resolve(
        {"max_num_seqs": args.batch, "prefix_caching": False, "max_model_len": 2048, "backend": args.backend}
    ).config
    engine = build_engine(config)
    jobs = make_jobs(random.Random(args.seed), args.requests, engine.info.vocab_size)
    names = ("static", "dynamic", "continuous")
    ledgers: dict[str, list[Ledger]] = {name: [] for name in names}
    with Progress(console=console) as done:
        done.add_task("requests", total=args.requests * len(names) * args.repeats)
        for _ in range(args.repeats):  # interleaved, so that a noisy neighbour hits all three
            for name in names:
                ledgers[name].append(run_policy(name, engine, jobs, args.batch, done))
    engine.core.close()
    rows = [report(name, jobs, ledgers[name]) for name in names]
    mean = statistics.mean(job.total for job in jobs)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    if args.plot:
        title = f"{args.requests} requests, {mean:.0f} tokens on average, at most {args.batch} at once"
        plot(args.plot, {name: ledgers[name][-1] for name in names}, rows, title)
    result = {
        "benchmark": "offline",
        "cpu": cpu.name(),
        "threads": config.threads or cpu.num_threads(),
        "python": platform.python_version(),
        "backend": engine.info.backend,
        "model": engine.info.name,
        "requests": args.requests,
        "mean_tokens": round(mean, 1),
        "repeats": args.repeats,
        "policies": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
