"""How fast a model loads, and what memory that takes, beside plainly reading its file.

Writes a random Llama of the given size as a safetensors directory, then, each in a process of its own and
with the file in the page cache, reads the file into one buffer, and loads it with each backend. Weights of
16 bits are widened to 32 while loading, so twice the file's bytes are written. Peak memory counts the pages
of the mapped file too. The last line of standard output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

HIDDEN, VOCAB = 1024, 8192
WAYS = ("read", "torch", "native")


def write_model(directory: Path, mib: int) -> None:
    """config.json and model.safetensors of about `mib` MiB of bf16."""
    matrices = {
        **{f"self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qkvo"},
        **{f"mlp.{p}_proj": (4 * HIDDEN, HIDDEN) for p in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, 4 * HIDDEN),
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (HIDDEN,))
    embedding = 2 * VOCAB * HIDDEN
    layers = max(1, ((mib << 20) - embedding) // (2 * 16 * HIDDEN * HIDDEN))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        each = {**matrices, **norms}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in each.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = rng.normal(0, 0.02, shape).astype(np.float32)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))


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
    parser.add_argument("--mib", type=int, default=512, help="size of the file")
    parser.add_argument("--measure", nargs=2, metavar=("DIRECTORY", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(Path(args.measure[0]), args.measure[1])
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_model(directory, args.mib)
        size = (directory / "model.safetensors").stat().st_size
        rows = []
        for way in WAYS:
            command = [sys.executable, __file__, "--measure", scratch, way]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(
        "way", "seconds", "file GiB/s", "weights MiB", "peak MiB", title=f"{size / 2**20:.0f} MiB, bf16"
    )
    for row in rows:
        rate = size / 2**30 / row["seconds"]
        shown = f"{row['seconds']:.2f}", f"{rate:.2f}", f"{row['weights_mib']:.0f}", f"{row['peak_mib']:.0f}"
        table.add_row(row["way"], *shown)
    Console().print(table)
    print(json.dumps({"file_bytes": size, "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
