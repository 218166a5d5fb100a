"""Attention alone against the machine: decode beside its reading speed, prefill beside its multiplying speed.

A program of attention ops only, with as many layers as make one step read more KV than --working-set MiB,
so that no layer's KV is in a cache when its turn comes again. Blocks lie in random order. The ceilings are
those of ceilings.py: reading memory, which a virtual machine shares with its neighbours, is measured before
every step; a share is the median of the pairs. Times are the fastest of --repeats, and the median.

The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import ceilings
from octavo.backends.base import DeviceMemory, StepInputs
from octavo.backends.native.backend import NativeBackend
from octavo.backends.torch.rotary import KV_DTYPES
from octavo.platforms import cpu
from octavo.program.builder import ProgramBuilder
from octavo.program.ir import BLOCK_SIZE, DType
from octavo.program.planner import Limits, seal
from octavo.quantization.formats import Format
from octavo.runner.cpu_model_runner import huge_pages

MIB = 1 << 20
SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}
DECODES = [(batch, context) for batch in (1, 8) for context in (1024, 4096)]
PREFILL_CHUNK = 256
PREFILLS = (0, 4096, 32768 - PREFILL_CHUNK)


@dataclass
class Case:
    """One step of sequences with `context` positions before `new` tokens each."""

    shape: str
    batch: int
    context: int
    new: int
    kv_dtype: DType

    def __post_init__(self) -> None:
        self.q_heads, self.kv_heads, self.dim = SHAPES[self.shape]
        self.length = self.context + self.new
        self.blocks = -(-self.length // BLOCK_SIZE)

    @property
    def name(self) -> str:
        return f"{'decode' if self.new == 1 else f'prefill of {self.new}'}, batch {self.batch}"


class Bench:
    """A case in memory, on one backend or several that take turns."""

    def __init__(self, case: Case, working_set: int, backends: list[NativeBackend]) -> None:
        builder = ProgramBuilder("attention", format_of=lambda parts: Format.F16, kv_dtype=case.kv_dtype)
        x = builder.embedding(builder.weight("q", (64, case.q_heads * case.dim)))
        layers = 0
        while True:
            kv = builder.kv(case.kv_heads, case.dim)
            layers += 1
            x = builder.attention(x, kv, q_heads=case.q_heads, scale=case.dim**-0.5)
            if case.new > 1 or layers * case.batch * case.blocks * kv.page_nbytes >= working_set:
                break
        program = builder.build(builder.gather_sampled(x))
        tokens = case.batch * case.new
        limits = Limits(tokens, case.batch, case.batch, case.length)
        self.case, self.backends = case, backends
        self.sizes = (tokens, case.batch, case.batch)
        self.kv_nbytes = layers * case.batch * case.length * kv.page_nbytes // BLOCK_SIZE
        seen = case.new * case.context + case.new * (case.new + 1) // 2
        self.macs = layers * case.batch * 2 * case.q_heads * case.dim * seen
        num_blocks = case.batch * case.blocks
        rng = np.random.default_rng(0)
        sealed = seal(program, limits, backends[0].table)
        memory = DeviceMemory(
            weights=torch.zeros(sealed.weights_nbytes, dtype=torch.uint8),
            arena=torch.zeros(sealed.arena_nbytes, dtype=torch.uint8),
            kv=huge_pages(layers, num_blocks, kv.page_nbytes),
        )
        weight = program.weights[0]
        q = rng.normal(size=weight.shape).astype(np.float16).view(np.uint16)
        memory.weights[: q.nbytes].view(torch.uint16).view(64, -1).copy_(torch.from_numpy(q))
        page = torch.from_numpy(rng.normal(size=num_blocks * kv.page_nbytes // 4).astype(np.float32))
        _fill(memory.kv, page, case.kv_dtype)
        self.inputs = _inputs(case, limits, rng.permutation(num_blocks))
        for backend in backends:
            backend.bind(sealed, memory, self.inputs)

    def run(self, which: int = 0) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.backends[which].run(*self.sizes)
        return time.perf_counter() - started


def _fill(kv: torch.Tensor, values: torch.Tensor, dtype: DType) -> None:
    """Ordinary numbers in every page: NaN and subnormals would have speeds of their own."""
    element = KV_DTYPES[dtype]
    for storage in kv:
        pages = storage.view(element).view(-1)
        for begin in range(0, len(pages), len(values)):
            part = pages[begin : begin + len(values)]
            part.copy_(values[: len(part)])


def _inputs(case: Case, limits: Limits, blocks: np.ndarray) -> StepInputs:
    inputs = StepInputs.allocate(limits, 1)
    for s in range(case.batch):
        span = slice(s * case.new, (s + 1) * case.new)
        inputs.positions[span] = range(case.context, case.length)
        inputs.block_table[0, s, : case.blocks] = blocks[s * case.blocks : (s + 1) * case.blocks]
        inputs.cu_q[s + 1] = (s + 1) * case.new
        inputs.seq_lens[s] = case.length
        inputs.sampled_rows[s] = (s + 1) * case.new - 1
    return inputs


def measure(bench: Bench, ceiling: Callable[[], float], repeats: int) -> dict[str, object]:
    """A row of the report. ceiling: 10^9 bytes or multiply-adds a second."""
    case = bench.case
    work = (bench.kv_nbytes if case.new == 1 else bench.macs) / 1e9
    bench.run()
    seconds, tops, shares = [], [], []
    for _ in range(repeats):
        tops.append(ceiling())
        seconds.append(bench.run())
        shares.append(work / seconds[-1] / tops[-1])
    best = min(seconds)
    return {
        "shape": case.shape,
        "step": case.name,
        "context": case.context,
        "ms": round(1e3 * best, 2),
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "gb_per_s": round(bench.kv_nbytes / best / 1e9, 1),
        "gmac_per_s": round(bench.macs / best / 1e9, 1),
        "ceiling": f"{statistics.median(tops):.1f} {'GB/s' if case.new == 1 else 'GMAC/s'}",
        "share": round(statistics.median(shares), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--kv-dtype", type=DType, default=DType.F16)
    parser.add_argument("--working-set", type=int, default=256, help="MiB of KV that a decode step reads")
    args = parser.parse_args()
    cases = [Case(shape, b, c, 1, args.kv_dtype) for shape in SHAPES for b, c in DECODES]
    cases += [Case(shape, 1, c, PREFILL_CHUNK, args.kv_dtype) for shape in SHAPES for c in PREFILLS]
    fma = ceilings.measure(args.threads).fma_f32
    backend = NativeBackend(args.threads, args.isa)
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for case in progress.track(cases, description="measuring"):
            bench = Bench(case, args.working_set * MIB, [backend])
            ceiling = (lambda: ceilings.dram(args.threads, windows=1)) if case.new == 1 else (lambda: fma)
            rows.append(measure(bench, ceiling, args.repeats))
            del bench
    isa = backend.isa
    backend.close()
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(stderr=True, width=140).print(table)
    result = {
        "benchmark": "attention",
        "cpu": cpu.name(),
        "threads": args.threads,
        "isa": isa,
        "python": platform.python_version(),
        "kv_dtype": args.kv_dtype,
        "working_set_mib": args.working_set,
        "repeats": args.repeats,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
