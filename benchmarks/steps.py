"""What a step costs: decoding at several batch sizes and one prefill, at each --activation-bits.

Runs the model runner alone, without scheduler or sampling, on the default model. The widths take turns,
so that a noisy neighbour hits both. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from octavo import ModelRunner
from octavo.config.resolve import resolve
from octavo.config.schema import ACTIVATION_BITS
from octavo.platforms import cpu
from octavo.program.ir import BLOCK_SIZE

BATCHES = (1, 2, 4, 8, 16, 32)
PREFILL = 512


def make_runner(activation_bits: str, context: int) -> ModelRunner:
    settings = {"activation_bits": activation_bits, "max_model_len": 2048, "backend": "native"}
    runner = ModelRunner("smollm2-135m-instruct", resolve(settings).config)
    runner.load(max(BATCHES) * (context // BLOCK_SIZE + 1) + PREFILL // BLOCK_SIZE)
    write_kv(runner)
    return runner


def write_kv(runner: ModelRunner) -> None:
    """Some KV everywhere: memory that nobody wrote is one page of zeros, which a cache holds."""
    kv = runner.memory.kv
    page = torch.randn(kv.shape[-1] // 2).to(torch.float16).view(torch.uint8)
    kv.copy_(page.expand_as(kv))


def step(runner: ModelRunner, num_seqs: int, tokens_each: int, context: int) -> float:
    """Seconds of one step in which each sequence gets some tokens on top of its context."""
    inputs, blocks = runner.inputs, -(-(context + tokens_each) // BLOCK_SIZE)
    for s in range(num_seqs):
        span = slice(s * tokens_each, (s + 1) * tokens_each)
        positions = range(context, context + tokens_each)
        inputs.positions[span] = positions
        inputs.token_ids[span] = [1000 + s] * tokens_each
        inputs.block_table[0, s, :blocks] = range(s * blocks, (s + 1) * blocks)
        inputs.slot_mapping[0, span] = [s * blocks * BLOCK_SIZE + p for p in positions]
        inputs.cu_q[s + 1] = (s + 1) * tokens_each
        inputs.seq_lens[s] = context + tokens_each
        inputs.sampled_rows[s] = (s + 1) * tokens_each - 1
    started = time.perf_counter()
    runner.backend.run(num_seqs * tokens_each, num_seqs, num_seqs)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--context", type=int, default=256, help="positions before a decoded token")
    args = parser.parse_args()
    runners = {bits: make_runner(bits, args.context) for bits in ACTIVATION_BITS}
    shapes = [(f"decode, batch {n}", n, 1, args.context) for n in BATCHES]
    shapes.append((f"prefill of {PREFILL}", 1, PREFILL, 0))
    rows = []
    for name, num_seqs, tokens_each, context in shapes:
        seconds: dict[str, list[float]] = {bits: [] for bits in runners}
        for _ in range(args.repeats + 1):
            for bits, runner in runners.items():
                seconds[bits].append(step(runner, num_seqs, tokens_each, context))
        row: dict[str, object] = {"step": name}
        for bits, times in seconds.items():
            median = statistics.median(times[1:])
            row[f"ms_{bits}"] = round(median * 1e3, 2)
            row[f"tokens_per_s_{bits}"] = round(num_seqs * tokens_each / median)
        rows.append(row)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(stderr=True).print(table)
    result = {
        "benchmark": "steps",
        "cpu": cpu.name(),
        "threads": cpu.num_threads(),
        "python": platform.python_version(),
        "model": "smollm2-135m-instruct",
        "context": args.context,
        "repeats": args.repeats,
        "steps": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
