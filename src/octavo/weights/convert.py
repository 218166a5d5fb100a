"""Writes a model as a directory of safetensors in Hugging Face's layout, quantised where that is asked for.

Rule: the directory appears under its name when all of it is written, and never replaces one. Weights go
through in pieces of half a million, so that the memory needed does not grow with the model: under 100 MB
beside the files' own pages, which the system drops when it wants to.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, ConfigError, ModelLoadError, UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.quantization.formats import GROUP
from octavo.quantization.pack_quantized import BITS, pack_rows, quantization_config
from octavo.quantization.quantize import Quantize, quantize
from octavo.weights.convert_sources import Source, SourceTensor, num_rows
from octavo.weights.fetching import lack_of_room, progress_bar
from octavo.weights.model_directory import CONFIG
from octavo.weights.quantize_on_load import PROJECTION
from octavo.weights.safetensors_writer import (
    MAX_SHARD_BYTES,
    PlannedTensor,
    SafetensorsWriter,
    safetensors_writer,
)

QUANTIZATIONS = ("none", *sorted(BITS))
#: What safetensors calls the dtypes that can be asked for.
DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = ("F64", "F32", "F16", "BF16")
_PIECE_WEIGHTS = 1 << 19


@dataclass(slots=True)
class Report:
    """What was done. nbytes_before and nbytes_after: of the files that hold the weights. errors: the
    relative error |w' - w| / |w| of each quantised matrix, norms over all of it."""

    nbytes_before: int
    nbytes_after: int
    num_tensors: int
    num_files: int
    errors: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor, and what it becomes. bits: 0 where it is written as `dtype`."""

    tensor: SourceTensor
    dtype: str
    bits: int

    def planned(self) -> list[PlannedTensor]:
        name, shape = self.tensor.name, self.tensor.shape
        if not self.bits:
            return [PlannedTensor(name, shape, self.dtype)]
        rows, width = shape
        return [
            PlannedTensor(f"{name}_packed", (rows, width * self.bits // 32), "I32"),
            PlannedTensor(f"{name}_scale", (rows, width // GROUP), "F16"),
            PlannedTensor(f"{name}_shape", (2,), "I64"),
        ]


def convert(
    source: Source,
    out: Path,
    *,
    quantization: str = "none",
    dtype: str = "auto",
    quantize: Quantize = quantize,
    progress: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Report:
    """Write `source` to the new directory `out`.

    quantization: one of QUANTIZATIONS. dtype: one of DTYPES for what is not quantised, "auto": as it is.
    quantize: the library's, or numpy's, of the same bits. progress: show a bar on standard error. Raises
    ConfigError for what makes no sense, ModelLoadError for what can't be converted or written.
    """
    check_request(out, quantization, dtype)
    _check_source(source, quantization, dtype)
    bits = BITS.get(quantization, 0)
    jobs = [_job(tensor, bits, dtype) for tensor in source.tensors]
    if bits and not any(job.bits for job in jobs):
        raise UnsupportedModelError(
            f"{source.path} has no matrix that would be quantised (those of attention and MLPs, with rows of "
            f"a multiple of {GROUP})"
        )
    planned = [tensor for job in jobs for tensor in job.planned()]
    total = sum(tensor.nbytes for tensor in planned)
    if lack := lack_of_room(out.parent, total):
        raise ModelLoadError(f"{out} {lack}; free some space or choose another place")
    report = Report(source.nbytes, 0, len(jobs), 0)
    with _new_directory(out) as folder:
        with (
            safetensors_writer(folder, planned, max_shard_bytes) as writer,
            progress_bar(f"Converting {source.path.name}", total, enabled=progress) as show,
        ):
            for job, done in zip(jobs, _ends(jobs), strict=True):
                _write(job, writer, report, quantize)
                show(done)
        report.num_files = len(writer.file_names)
        report.nbytes_after = sum((folder / name).stat().st_size for name in writer.file_names)
        _write_files(source, folder, _config(source.config, jobs, bits, dtype))
    return report


def check_request(out: Path, quantization: str, dtype: str) -> None:
    """Raise ConfigError for what can be seen to make no sense before a source is opened, or fetched."""
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is {quantization!r}; it must be one of {', '.join(QUANTIZATIONS)}")
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPES)}")
    if os.path.lexists(out):
        raise ConfigError(
            f"{out} is there already, and nothing is replaced; remove it or choose another name"
        )


def _check_source(source: Source, quantization: str, dtype: str) -> None:
    changes = (quantization, dtype) != ("none", "auto")
    if source.is_safetensors and not changes:
        raise ConfigError(
            f"{source.path} is in safetensors already; say what to change, with --quantization or --dtype"
        )
    if changes and source.config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{source.path} is quantised already (quantization_config in its {CONFIG}); convert the model "
            "that it was made from"
        )


def _job(tensor: SourceTensor, bits: int, dtype: str) -> _Job:
    shape = tensor.shape
    fits = tensor.dtype in _FLOATS and len(shape) == 2 and shape[1] % GROUP == 0
    if bits and fits and PROJECTION.fullmatch(tensor.name):
        return _Job(tensor, tensor.dtype, bits)
    if dtype == "auto" or tensor.kept_as not in _FLOATS:
        return _Job(tensor, tensor.kept_as, 0)
    return _Job(tensor, DTYPES[dtype], 0)


def _ends(jobs: list[_Job]) -> Iterator[int]:
    """Bytes written after each job."""
    done = 0
    for job in jobs:
        done += sum(tensor.nbytes for tensor in job.planned())
        yield done


def _write(job: _Job, writer: SafetensorsWriter, report: Report, quantize: Quantize) -> None:
    tensor, name = job.tensor, job.tensor.name
    rows = num_rows(tensor.shape)
    width = tensor.shape[-1] if tensor.shape else 1
    step = max(1, _PIECE_WEIGHTS // max(1, width))
    error = norm = 0.0
    try:
        for start in range(0, rows, step):
            raw = tensor.read(start, min(rows, start + step))
            if not job.bits:
                writer.append(name, _cast(raw, tensor.dtype, job.dtype))
                continue
            packed = pack_rows(_as_f32(raw, tensor.dtype), job.bits, quantize)
            writer.append(f"{name}_packed", packed.packed)
            writer.append(f"{name}_scale", packed.scale)
            error, norm = error + packed.squared_error, norm + packed.squared_norm
    except CheckpointError as problem:
        raise CheckpointError(f"tensor {name!r} can't be converted: {problem}") from problem
    if job.bits:
        writer.append(f"{name}_shape", np.array(tensor.shape, dtype="<i8"))
        report.errors[name] = (error / norm) ** 0.5 if norm else 0.0


def _as_f32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(raw).view(np.float64).astype(np.float32)
    return dequantize(raw, dtype)


def _cast(raw: npt.NDArray[np.uint8], dtype: str, wanted: str) -> npt.NDArray[Any]:
    """Rows in another float dtype, rounded to nearest."""
    if dtype == wanted:
        return np.ascontiguousarray(raw)
    values = _as_f32(raw, dtype)
    cast: npt.NDArray[Any]
    if wanted == "BF16":
        cast = _as_bf16(values)
        overflows = (cast & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            cast = values.astype({"F16": np.float16, "F32": np.float32}[wanted])
        overflows = np.isinf(cast)
    finite = np.isfinite(raw.view(np.float64)) if dtype == "F64" else np.isfinite(values)
    if (overflows & finite).any():
        raise CheckpointError(
            f"it has numbers as large as {np.abs(values[finite]).max():g}, which {_NAMES[wanted]} can't "
            "hold; choose another --dtype"
        )
    return cast


def _as_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _config(config: dict[str, Any], jobs: list[_Job], bits: int, dtype: str) -> dict[str, Any]:
    written = dict(config)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if dtype != "auto":
        written[key] = dtype
    elif key not in config:
        matrices = [job.dtype for job in jobs if not job.bits and len(job.tensor.shape) > 1]
        written[key] = next((_NAMES[dtype] for dtype in matrices if dtype in _NAMES), "float16")
    if bits:
        kept = [job.tensor.name for job in jobs if not job.bits and len(job.tensor.shape) == 2]
        modules = [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]
        written["quantization_config"] = quantization_config(bits, sorted({*modules, "lm_head"}))
    return written


def _write_files(source: Source, folder: Path, config: dict[str, Any]) -> None:
    for name, content in source.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory that gets the name `out` if all goes well, and is removed otherwise."""
    folder = out.with_name(f".{out.name}.octavo-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        folder.rename(out)
    except OSError as error:
        raise ModelLoadError(
            f"{out} could not be written: {error}; free some space or choose another place"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
