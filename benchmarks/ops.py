"""Kernels beside what this machine can do at most (ceilings.py), measured in the same run.

linear in each format, with shapes of SmolLM2 (135M) and of a Llama of 8B, on 1 to 512 rows; the head; norms
and the activation. A kernel's share of the ceiling is the time that its multiply-adds would take with the
CPU's best instruction for their width, or its weights from memory, whichever is longer, over the time that it
takes. Memory, which a virtual machine shares with its neighbours, is measured again before each matrix. Ops
without matrices are beside the last cache. Times are the best of --repeats.

The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ceilings
from ceilings import Ceilings
from octavo.backends.native.backend import NativeBackend
from octavo.platforms import cpu
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import Buf
from octavo.quantization.formats import GROUP, Format
from op_bench import OpBench

#: Columns and outputs of matrices.
SHAPES = {
    "135M gate_up": (576, 3072),
    "135M down": (1536, 576),
    "135M head": (576, 49152),
    "8B qkv": (4096, 6144),
    "8B down": (14336, 4096),
}
HEADS = ("135M head",)
MAX_HEAD_ROWS = 32
ROWS = (1, 8, 32, 128, 512)
WIDTH, WIDE = 576, 1536  # columns of rows without a matrix: hidden, intermediate
ROW_COPIES = 64
DRAM_WINDOWS = 6
TABLE_WIDTH = 140  # of tables in a file


@dataclass(frozen=True)
class Timed:
    """One kernel on one number of rows.

    nbytes: the weight's, or those of the rows where there is none. bits: of activations as they are
    multiplied. dram: 10^9 bytes a second, right before.
    """

    kernel: str
    shape: str
    rows: int
    seconds: float
    macs: int
    nbytes: int
    bits: int = 32
    dram: float = 0.0

    def result(self, top: Ceilings) -> dict[str, Any]:
        """Beside the ceilings."""
        if self.macs:
            floors = {"arithmetic": self.macs / top.macs(self.bits), "memory": self.nbytes / self.dram}
        else:
            floors = {"cache": self.nbytes / (top.l3 or top.dram)}
        bound = max(floors, key=lambda name: floors[name])
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "rows": self.rows,
            "us": round(1e6 * self.seconds, 1),
            "gmac_per_s": round(1e-9 * self.macs / self.seconds, 1),
            "gb_per_s": round(1e-9 * self.nbytes / self.seconds, 1),
            "bound": bound,
            "dram_gb_per_s": round(self.dram, 1),
            "of_ceiling": round(1e-9 * floors[bound] / self.seconds, 3),
        }


def activation_bits(format_: Format) -> tuple[int, ...]:
    """Widths that activations may have where they meet weights of a format; 32 for f32."""
    if not format_.quantized:
        return (32,)
    return (16, 8) if format_.group_nbytes < 32 else (16,)  # those of 4 bits leave the choice


def linear(backend: NativeBackend, format_: Format, bits: int, shape: str, mib: int) -> OpBench:
    """Copies of a matrix, together at least `mib` MiB."""
    columns, outputs = SHAPES[shape]
    nbytes = columns * outputs * format_.group_nbytes // GROUP

    def emit(b: ProgramBuilder, x: Buf, i: int) -> Buf:
        return b.linear(x, b.weight(f"w{i}", (outputs, columns)))

    head = shape in HEADS
    max_rows = MAX_HEAD_ROWS if head else max(ROWS)
    copies = -(-(mib << 20) // nbytes)
    return OpBench(
        backend, columns, copies, emit, format_=format_, activation_bits=bits, max_rows=max_rows, sampled=head
    )  # fmt: skip


def matrices(backend: NativeBackend, args: argparse.Namespace) -> Iterator[Timed]:
    """linear, in every format and shape."""
    for format_ in args.formats:
        for bits, shape in itertools.product(activation_bits(format_), SHAPES):
            if shape in HEADS and not format_.quantized:
                continue  # of a file that is quantised, as most are
            bench = linear(backend, format_, bits, shape, args.mib)
            columns, outputs = SHAPES[shape]
            dram = ceilings.dram(args.threads, DRAM_WINDOWS)
            for rows in (rows for rows in ROWS if rows <= bench.max_rows):
                seconds = min(bench.run(rows) for _ in range(args.repeats))
                macs = rows * columns * outputs
                yield Timed(bench.kernel, shape, rows, seconds, macs, bench.weight_nbytes, bits, dram)


def rowwise(backend: NativeBackend, args: argparse.Namespace) -> Iterator[Timed]:
    """Ops without matrices: their rows are read and written, in the caches."""

    def norm(b: ProgramBuilder, x: Buf, i: int) -> Buf:
        return b.rms_norm(x, b.weight(f"w{i}", (WIDTH,)), eps=1e-5)

    def add_norm(b: ProgramBuilder, x: Buf, i: int) -> Buf:
        return b.add_rms_norm(x, x, b.weight(f"w{i}", (WIDTH,)), eps=1e-5)[0]

    def silu(b: ProgramBuilder, x: Buf, i: int) -> Buf:
        return b.gated_activation(x, "silu")

    ops = ((norm, WIDTH, 2 * WIDTH), (add_norm, WIDTH, 4 * WIDTH), (silu, 2 * WIDE, 3 * WIDE))
    for emit, columns, floats in ops:
        bench = OpBench(backend, columns, ROW_COPIES, emit)
        for rows in ROWS:
            seconds = min(bench.run(rows) for _ in range(10 * args.repeats))  # they are short
            yield Timed(bench.kernel, f"{columns}", rows, seconds, 0, 4 * rows * floats)


def table_of(results: list[dict[str, Any]]) -> Table:
    """A line a kernel and shape, a column a number of rows."""
    table = Table("kernel", "shape", title="best of the repeats, and its share of the ceiling")
    for rows in ROWS:
        table.add_column(f"{rows} rows" if rows > 1 else "1 row", justify="right")
    for (kernel, shape), group in itertools.groupby(results, lambda each: (each["kernel"], each["shape"])):
        cells = []
        for each in group:
            arithmetic = each["bound"] == "arithmetic"
            speed = f"{each['gmac_per_s']:.0f} GMAC/s" if arithmetic else f"{each['gb_per_s']:.0f} GB/s"
            cells.append(f"{speed} {each['of_ceiling']:4.0%}")
        table.add_row(kernel, shape, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--formats", nargs="+", type=Format, default=list(Format), metavar="FORMAT")
    parser.add_argument("--mib", type=int, default=96, help="size of the copies of a matrix together")
    args = parser.parse_args()
    console = Console(stderr=True)
    console.width = max(console.width, TABLE_WIDTH)
    backend = NativeBackend(args.threads, args.isa)
    top = ceilings.measure(args.threads)
    timed = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        for each in itertools.chain(rowwise(backend, args), matrices(backend, args)):
            timed.append(each)
            progress.update(task, description=f"{each.kernel}, {each.shape}", advance=1)
    top = top.or_higher(ceilings.measure(args.threads))
    results = [each.result(top) for each in timed]
    console.print(top.table(), table_of(results))
    result = {
        "benchmark": "ops",
        "cpu": cpu.name(),
        "threads": args.threads,
        "isa": backend.isa,
        "python": platform.python_version(),
        "repeats": args.repeats,
        "ceilings": top.rounded(),
        "ops": results,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
