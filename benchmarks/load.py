"""How fast a model loads, and what memory that takes, beside plainly reading its file.

Writes a random Llama of the given size as a safetensors directory, then, in turn, each in a process of its
own and with the file in the page cache, reads the file into one buffer, and loads it with each backend.
Weights stay bf16. Peak memory counts Python, torch and the pages of the mapped file too. Medians of the
repetitions. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import random_llama

HIDDEN, VOCAB = 1024, 8192
WAYS = ("torch", "native")


def shape_of(mib: int) -> random_llama.Shape:
    """A model of about `mib` MiB."""
    layers = max(1, ((mib << 20) - 2 * VOCAB * HIDDEN) // (2 * 16 * HIDDEN * HIDDEN))
    return random_llama.Shape(HIDDEN, 4 * HIDDEN, layers, 16, 16, VOCAB, 2048)


def measure(directory: Path, way: str) -> None:
    """In a process of its own: load, and print seconds and bytes as JSON."""
    from octavo import ModelRunner
    from octavo.config.resolve import resolve

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if way == "read":
        weights = len((directory / "model.safetensors").read_bytes())
    else:
        runner = ModelRunner(directory, resolve({"backend": way, "max_model_len": 64}).config)
        runner.load(4)
        weights = runner.sealed.weights_nbytes
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = {"way": way, "seconds": seconds, "peak_mib": peak / 1024, "weights_mib": weights / 2**20}
    print(json.dumps(row | {"before_mib": before / 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1536, help="size of the file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(Path(args.measure[0]), args.measure[1])
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        file = random_llama.write(directory, shape_of(args.mib))
        size = file.stat().st_size
        with file.open("rb") as written:  # still to be written back: that would slow whoever is first
            os.fsync(written.fileno())
        runs = [in_a_process(scratch, way) for _ in range(args.repeats) for way in ("read", *WAYS)]
    rows = [medians([run for run in runs if run["way"] == way]) for way in ("read", *WAYS)]
    table = Table(
        *("way", "seconds", "of reading", "weights MiB", "peak MiB", "beyond weights MiB"),
        title=f"{size / 2**20:.0f} MiB, bf16, medians of {args.repeats}",
    )
    for row in rows:
        row["of_reading"] = row["seconds"] / rows[0]["seconds"]
        row["beyond_mib"] = row["peak_mib"] - row["weights_mib"]
        table.add_row(
            row["way"], f"{row['seconds']:.2f}", f"{row['of_reading']:.2f}x", f"{row['weights_mib']:.0f}",
            f"{row['peak_mib']:.0f}", f"{row['beyond_mib']:.0f}",
        )  # fmt: skip
    Console().print(table)
    print(json.dumps({"file_bytes": size, "python": platform.python_version(), "rows": rows}))


def in_a_process(scratch: str, way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", scratch, way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "way"}
    return {"way": runs[0]["way"], **numbers}


if __name__ == "__main__":
    main()
