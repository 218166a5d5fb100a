"""How a decode step grows: over sequences and over context, each fitted with a + b n.

The default model's runner alone, without scheduler or sampling. b is beside the slope of a floor: what the
listing's multiply-adds and bytes (program/pricing.py) would take at this machine's ceilings (ceilings.py), op
by op whichever is longer, fitted over the same n. The fit minimises relative errors; residual is the largest.
Times are the best of --repeats, which take turns over all n.

The last line of standard output is JSON. --plot writes a chart.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ceilings
from ceilings import Ceilings
from octavo import ModelRunner
from octavo.config.resolve import resolve
from octavo.config.schema import ACTIVATION_BITS
from octavo.platforms import cpu
from octavo.program.ir import BLOCK_SIZE, Linear
from octavo.program.pricing import OpCost, StepShape, price
from steps import step, write_kv

MODEL = "smollm2-135m-instruct"
BATCHES = (8, 16, 24, 32, 48, 64, 96, 128)
BATCHES_CONTEXT = 256
CONTEXTS = (512, 1024, 2048, 3072, 4096, 6144, 8191)
CONTEXTS_BATCH = 4


@dataclass(frozen=True)
class Curve:
    """Seconds of a step over n, measured and as the floor has them."""

    over: str
    fixed: str
    n: tuple[int, ...]
    seconds: list[float]
    floor: list[float]

    def fit(self, seconds: list[float]) -> tuple[float, float]:
        """a, b of seconds = a + b n."""
        b, a = np.polyfit(self.n, seconds, 1, w=1 / np.asarray(seconds))
        return float(a), float(b)

    def report(self) -> dict[str, Any]:
        """For JSON."""
        a, b = self.fit(self.seconds)
        _, floor = self.fit(self.floor)
        residuals = [abs(a + b * n - s) / s for n, s in zip(self.n, self.seconds, strict=True)]
        return {
            "over": self.over,
            "fixed": self.fixed,
            "ms": {n: round(1e3 * s, 2) for n, s in zip(self.n, self.seconds, strict=True)},
            "a_ms": round(1e3 * a, 3),
            "b_us": round(1e6 * b, 3),
            "floor_b_us": round(1e6 * floor, 3),
            "b_over_floor": round(b / floor, 2),
            "residual": round(max(residuals), 3),
        }


def make_runner(args: argparse.Namespace) -> ModelRunner:
    """A runner with KV for the largest step."""
    settings = {
        "activation_bits": args.activation_bits,
        "backend": "native",
        "threads": args.threads,
        "max_num_seqs": max(BATCHES),
    }
    runner = ModelRunner(MODEL, resolve(settings).config)
    per_sequence = [(b, BATCHES_CONTEXT) for b in BATCHES] + [(CONTEXTS_BATCH, c) for c in CONTEXTS]
    runner.load(max(b * (c // BLOCK_SIZE + 1) for b, c in per_sequence))
    write_kv(runner)
    return runner


def floor(runner: ModelRunner, top: Ceilings, batch: int, context: int) -> float:
    """Seconds that no step of these sequences can go below at the machine's ceilings."""
    positions = batch * (context + 1)
    shape = StepShape(batch, batch, batch, query_context=positions, kv_tokens=positions)
    costs = price(runner.program, shape, runner.backend.table.weight_nbytes)
    return sum(_floor(cost, top) for cost in costs)


def _floor(cost: OpCost, top: Ceilings) -> float:
    width = 32
    if isinstance(cost.op, Linear) and cost.op.weight.format.quantized:
        width = 8 if cost.op.activation_top < 128 else 16
    return max(cost.flops / 2 / top.macs(width), (cost.weight_nbytes + cost.kv_nbytes) / top.dram) / 1e9


def measure(runner: ModelRunner, top: Ceilings, repeats: int, progress: Progress) -> list[Curve]:
    """Both curves."""
    sizes = {
        ("sequences", f"context {BATCHES_CONTEXT}"): [(b, BATCHES_CONTEXT) for b in BATCHES],
        ("context", f"{CONTEXTS_BATCH} sequences"): [(CONTEXTS_BATCH, c) for c in CONTEXTS],
    }
    curves = []
    for (over, fixed), points in sizes.items():
        runs = [
            [step(runner, batch, 1, context) for batch, context in points]
            for _ in progress.track(range(repeats), description=f"over {over}")
        ]
        best = np.min(runs, axis=0).tolist()
        floors = [floor(runner, top, batch, context) for batch, context in points]
        ns = BATCHES if over == "sequences" else CONTEXTS
        curves.append(Curve(over, fixed, ns, best, floors))
    return curves


def plot(path: Path, curves: list[Curve]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    for axis, curve in zip(axes, curves, strict=True):
        a, b = curve.fit(curve.seconds)
        ends = np.array([0, max(curve.n)])
        axis.plot(curve.n, 1e3 * np.array(curve.seconds), "o", markersize=4, label="measured")
        axis.plot(ends, 1e3 * (a + b * ends), linewidth=1.2, color="C0", label="a + b n")
        axis.plot(
            curve.n, 1e3 * np.array(curve.floor), linewidth=1.2, color="C7", label="the machine's floor"
        )
        axis.set(
            xlabel=f"{curve.over} ({curve.fixed})", ylabel="a decode step, ms", xlim=(0, None), ylim=(0, None)
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("a decode step, ms")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--activation-bits", choices=ACTIVATION_BITS, default="mixed")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    console = Console(stderr=True)
    top = ceilings.measure(args.threads)
    runner = make_runner(args)
    with Progress(console=console, transient=True) as progress:
        curves = measure(runner, top, args.repeats, progress)
    reports = [curve.report() for curve in curves]
    table = Table("over", "fixed", "a, ms", "b, us", "floor's b, us", "b / floor's", "residual")
    for report in reports:
        table.add_row(*(str(value) for name, value in report.items() if name != "ms"))
    console.print(table)
    if args.plot:
        plot(args.plot, curves)
    result = {
        "benchmark": "growth",
        "cpu": cpu.name(),
        "threads": args.threads,
        "isa": getattr(runner.backend, "isa", ""),
        "python": platform.python_version(),
        "model": MODEL,
        "activation_bits": args.activation_bits,
        "repeats": args.repeats,
        "ceilings": top.rounded(),
        "curves": reports,
    }
    runner.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
