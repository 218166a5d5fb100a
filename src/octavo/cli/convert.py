"""`octavo convert`: write a model as safetensors, quantised if that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from octavo.cli.terminal import console, escape
from octavo.config.resolve import resolve

if TYPE_CHECKING:  # they take a while, and `--help` should not wait for them
    from octavo.weights.convert import Report
    from octavo.weights.convert_sources import Source


def convert(
    source: Annotated[str, Parameter(help="Directory (safetensors, .bin or .pth), .gguf file, or a name.")],
    out: Annotated[Path, Parameter(help="The directory to write; it must not be there yet.")],
    /,
    *,
    quantization: Annotated[
        str, Parameter(help="none, int8 or int4: weights of attention and MLPs, in groups of 32.")
    ] = "none",
    dtype: Annotated[
        str, Parameter(help="auto (as it is), float16, bfloat16 or float32, for what isn't quantised.")
    ] = "auto",
) -> None:
    """Write a model as a directory of safetensors in Hugging Face's layout, and print its path.

    Quantised weights are in compressed-tensors' "pack-quantized" layout, which other engines read too.
    Pickled weights (.bin, .pth) are read as tensors alone; what could run code is refused.
    """
    from octavo.backends.native.quantizer import quantizer
    from octavo.platforms import cpu
    from octavo.weights import convert as conversion

    conversion.check_request(out, quantization, dtype)
    with quantizer(cpu.num_threads()) as quantize:
        report = conversion.convert(
            _open(source), out, quantization=quantization, dtype=dtype, quantize=quantize, progress=True
        )
    console().print(_table(report))
    print(out.absolute())


def _open(name: str) -> Source:
    from octavo.weights.convert_sources import open_directory
    from octavo.weights.sources import resolve_model

    config = resolve({}).config
    path = resolve_model(name, config.cache_path, progress=True, offline=config.offline)
    return open_directory(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Source:
    from octavo.input.gguf_tokenizer import parts_from_gguf
    from octavo.input.tokenizer_files import tokenizer_files
    from octavo.models.registry import model_builder
    from octavo.program.builder import ProgramBuilder
    from octavo.program.ir import DType
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.convert_gguf import open_gguf

    checkpoint = open_checkpoint(path)
    # The family's program names every tensor that the model computes with.
    builder = ProgramBuilder(checkpoint.architecture, format_of=checkpoint.format_of, kv_dtype=DType.F16)
    context = int(checkpoint.config["max_position_embeddings"])
    program = model_builder(checkpoint.architecture)(builder, checkpoint.config, context)
    names = [part for weight in program.weights for part in weight.parts]
    checkpoint.check_all_used(names)
    parts = parts_from_gguf(checkpoint.metadata)
    return open_gguf(checkpoint, names, tokenizer_files(parts), bos_id=parts.bos_id, eos_ids=parts.eos_ids)


def _table(report: Report) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    before, after = report.nbytes_before, report.nbytes_after
    rows = [
        ("before", f"{before / 1e6:,.1f} MB"),
        ("after", f"{after / 1e6:,.1f} MB ({after / before:.0%}), files: {report.num_files}"),
        ("tensors", f"{report.num_tensors}, of which {len(report.errors)} quantised"),
    ]
    if report.errors:
        worst = max(report.errors, key=lambda name: report.errors[name])
        mean = sum(report.errors.values()) / len(report.errors)
        rows += [("mean error", f"{mean:.3%}"), ("worst error", f"{report.errors[worst]:.3%} ({worst})")]
    for name, value in rows:
        table.add_row(name, escape(value))
    return table
