"""Octavo beside llama.cpp and transformers: the same file, the same machine, the same number of threads.

Each engine is loaded once in a process of its own, then told one measurement at a time while the others wait.
A round has each engine once, in an order that turns round every time; ratios are those of a round. A round in
which others took more than a tenth of the machine is made again as long as --patience seconds last: engines
bear that very differently, since threads that spin for one that has lost its core stand still.

llama.cpp is what llama-cpp-python has, compiled for this CPU at the first run, and called by its batches. It
sees the default model's file (Q4_1) and a copy of it quantised to Q4_0, for which it has faster kernels.
transformers gets the first file's weights, dequantised. Octavo runs its whole engine core, once for each of
--activation-bits.

The last line of standard output is JSON. --plot writes a chart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ceilings
from octavo.config.resolve import resolve
from octavo.config.schema import ACTIVATION_BITS
from octavo.platforms import cpu
from octavo.weights.sources import resolve_model
from peers.bench import Measurement, Sample, Worker, decode, prefill
from peers.install import llama_python
from peers.requantize import as_q4_0

MODEL = "smollm2-135m-instruct"
MOST_OTHERS = 0.1  # of the machine, beyond which a round is made again
LLAMA, TRANSFORMERS = "llama.cpp", "transformers"
WIDTH = 140  # of tables in a file

Round = dict[str, Sample]


MEASUREMENTS = (prefill(512), decode(1, 64), decode(8, 32), decode(32, 12))


class Bench:
    """Rounds of measurements, made again while there is patience."""

    def __init__(self, repeats: int, patience: float) -> None:
        self.repeats = repeats
        self.patience = patience

    def rounds(self, workers: dict[str, Worker], what: Measurement) -> Iterator[Round]:
        """`repeats` rounds, after a short one."""
        names = list(workers)
        for name in names:
            workers[name].measure(what.shortened())
        for _ in range(self.repeats):
            names.reverse()
            while True:
                started = time.perf_counter()
                samples = {name: workers[name].measure(what) for name in names}
                seconds = time.perf_counter() - started
                if max(sample.others for sample in samples.values()) < MOST_OTHERS or self.patience < seconds:
                    break
                self.patience -= seconds
            yield {name: samples[name] for name in workers}


@contextmanager
def engines(
    path: Path, llama: Path, args: argparse.Namespace, *, all_of_them: bool
) -> Iterator[dict[str, Worker]]:
    """The processes, each loaded before the next starts."""
    file, threads = str(path), f"--threads={args.threads}"
    with ExitStack() as stack:

        def start(python: str | Path, script: str, *arguments: str) -> Worker:
            made = stack.enter_context(closing(Worker(python, script, file, threads, *arguments)))
            made.about()
            return made

        found = {
            f"octavo, {bits}": start(sys.executable, "octavo_worker.py", f"--activation-bits={bits}")
            for bits in args.activation_bits
        }
        found[LLAMA] = start(llama, "llama_worker.py")
        if all_of_them and args.transformers != "none":
            dtype = f"--dtype={args.transformers}"
            found[TRANSFORMERS] = start(sys.executable, "transformers_worker.py", dtype)
        yield found


def summary(what: Measurement, rounds: list[Round]) -> dict[str, Any]:
    """Medians of tokens a second, and of ratios to llama.cpp, with the smallest and the largest."""
    row: dict[str, Any] = {"measurement": what.name, "tokens_per_s": {}, "ratios": {}}
    for name in rounds[0]:
        row["tokens_per_s"][name] = round(statistics.median(each[name].tokens_per_s for each in rounds), 1)
    for ours in (name for name in rounds[0] if name.startswith("octavo")):
        ratios = sorted(each[ours].tokens_per_s / each[LLAMA].tokens_per_s for each in rounds)
        spread = (statistics.median(ratios), ratios[0], ratios[-1])
        row["ratios"][f"{ours} / {LLAMA}"] = [round(ratio, 2) for ratio in spread]
    row["disturbed"] = sum(max(s.others for s in each.values()) > MOST_OTHERS for each in rounds)
    return row


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    speeds, ratios = list(rows[0]["tokens_per_s"]), list(rows[0]["ratios"])
    table = Table("tokens a second", title=title)
    for name in (*speeds, *(name.replace(" / ", " /\n") for name in ratios), "disturbed"):
        table.add_column(name, justify="right")
    for row in rows:
        spreads = (row["ratios"][name] for name in ratios)
        table.add_row(
            row["measurement"],
            *(f"{row['tokens_per_s'][name]:.0f}" for name in speeds),
            *(f"{median:.2f} ({low:.2f}-{high:.2f})" for median, low, high in spreads),
            str(row["disturbed"]),
        )
    return table


def plot(path: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(files), figsize=(10, 3.2), layout="constrained", sharey=True)
    for axis, (name, rows) in zip(axes, files.items(), strict=True):
        engines = list(rows[0]["tokens_per_s"])
        width = 0.8 / len(engines)
        for i, engine in enumerate(engines):
            places = [place + (i - (len(engines) - 1) / 2) * width for place in range(len(rows))]
            bars = axis.bar(places, [row["tokens_per_s"][engine] for row in rows], width, label=engine)
            axis.bar_label(bars, fmt="%.0f", fontsize=6)
        axis.set_xticks(range(len(rows)), [row["measurement"] for row in rows], fontsize=8)
        axis.set_title(name, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens a second")
    axes[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=30, help="seconds for rounds that others disturbed")
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--files", nargs="+", choices=["Q4_1", "Q4_0"], default=["Q4_1", "Q4_0"])
    parser.add_argument("--peers-dir", type=Path, help="environment of llama-cpp-python; made if need be")
    parser.add_argument("--transformers", choices=["bfloat16", "float32", "none"], default="bfloat16")
    parser.add_argument("--activation-bits", nargs="+", choices=ACTIVATION_BITS, default=["16", "8"])
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    config = resolve({}).config
    ours = config.cache_path / "benchmarks"
    llama = llama_python(args.peers_dir or ours / "llama-cpp-python")
    source = resolve_model(MODEL, config.cache_path, progress=True, offline=config.offline)
    paths = {"Q4_1": source, "Q4_0": ours / f"{MODEL}-q4_0.gguf"}
    as_q4_0(source, paths["Q4_0"])
    bench = Bench(args.repeats, args.patience)
    about: dict[str, Any] = {}
    files: dict[str, list[dict[str, Any]]] = {}
    console = Console(stderr=True)
    console.width = max(console.width, WIDTH)
    with Progress(console=console, transient=True) as progress:
        for name in args.files:
            rows = files[name] = []
            with engines(paths[name], llama, args, all_of_them=name == args.files[0]) as workers:
                about[name] = {engine: worker.about() for engine, worker in workers.items()}
                for what in MEASUREMENTS:
                    task = progress.add_task(f"{name}: {what.name}", total=args.repeats)
                    rounds = list(progress.track(bench.rounds(workers, what), task_id=task))
                    rows.append(summary(what, rounds))
            console.print(table_of(f"{MODEL}, {name}, {args.threads} threads", rows))
    if args.plot:
        plot(args.plot, files)
    result = {
        "benchmark": "compare",
        "cpu": cpu.name(),
        "threads": args.threads,
        "dram_gb_per_s": round(ceilings.dram(args.threads), 1),
        "python": platform.python_version(),
        "model": MODEL,
        "repeats": args.repeats,
        "engines": about,
        "files": files,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
