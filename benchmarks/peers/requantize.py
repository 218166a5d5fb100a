"""A copy of a GGUF file whose Q4_1 tensors are Q4_0, so that a comparison has both; all else is as it was."""

from __future__ import annotations

import os
from pathlib import Path

import gguf

_FROM, _TO = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q4_0
_COMPUTED = (
    "GGUF.version",
    "GGUF.tensor_count",
    "GGUF.kv_count",
    "general.architecture",
    "general.file_type",
)


def as_q4_0(source: Path, target: Path) -> Path:
    """Write `target` unless it is there; returns it."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    fresh = target.with_suffix(f".{os.getpid()}")
    writer = gguf.GGUFWriter(fresh, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name not in _COMPUTED and not field.name.startswith("GGUF."):
            nested = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], nested)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind is _FROM:
            data, kind = gguf.quants.quantize(gguf.quants.dequantize(data, _FROM), _TO), _TO
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fresh.rename(target)
    return target
