"""Weights that PyTorch pickled, opened without running what a pickle may hold.

Rule: torch.load(weights_only=True) and nothing else. It builds tensors and plain containers, and refuses
whatever else a pickle asks for. Files are mapped, so that only the rows being converted need memory; the
oldest kind (before PyTorch 1.6) can't be, and is read whole.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.convert_sources import Source, num_rows, shard_names

_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"
_SUFFIXES = (".bin", ".pth", ".pt")
#: What trainers leave beside the weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor that torch loaded."""

    name: str
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> str:
        """The stored one."""
        return _DTYPES[self.values.dtype]

    @property
    def kept_as(self) -> str:
        """The stored one."""
        return self.dtype

    def read(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """See SourceTensor."""
        values = self.values
        if values.ndim != 2:
            values = values.reshape(num_rows(self.shape), self.shape[-1] if self.shape else 1)
        # Cut first: a transposed matrix is copied to make its rows contiguous.
        data: npt.NDArray[np.uint8] = values[start:stop].contiguous().view(torch.uint8).numpy()
        return data


def open_pickles(path: Path, config: dict[str, Any], files: Mapping[str, Path | str]) -> Source:
    """The weights of a directory that has no safetensors.

    Raises UnsupportedModelError for tensors that are not called as in Hugging Face's models, CheckpointError
    for pickles that hold more than tensors.
    """
    paths = _find(path)
    values: dict[str, torch.Tensor] = {}
    for file in paths:
        values |= _load(file)
    if not any(name.startswith(("model.layers.", "model.embed_tokens.")) for name in values):
        raise UnsupportedModelError(
            f"{path}: its tensors are called {', '.join(sorted(values)[:4])!s:.200} ..., not as in Hugging "
            "Face's models (model.layers.0. ...); use the model's repository in that layout, or the "
            "conversion script of transformers for its family"
        )
    config = dict(config)
    if _HEAD in values and _EMBEDDING in values and _are_one(values[_HEAD], values[_EMBEDDING]):
        del values[_HEAD]  # tied: pickles share memory, safetensors does not
        config["tie_word_embeddings"] = True
    return Source(
        path=path,
        config=config,
        tensors=[TorchTensor(name, tensor) for name, tensor in values.items()],
        files=files,
        nbytes=sum(file.stat().st_size for file in paths),
    )


def _find(path: Path) -> list[Path]:
    if (path / _INDEX).is_file():
        return [path / name for name in dict.fromkeys(shard_names(path / _INDEX, "bin").values())]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    found = sorted(
        file
        for file in path.iterdir()
        if file.suffix in _SUFFIXES and file.is_file() and not file.name.startswith(_NO_WEIGHTS)
    )
    if not found:
        raise CheckpointError(
            f"{path} has no weights: no model.safetensors or its index, and no file ending in "
            f"{', '.join(_SUFFIXES)}; fetch the model again"
        )
    if len(found) > 1:
        raise UnsupportedModelError(
            f"{path} has {', '.join(file.name for file in found[:6])} and no {_INDEX} that says how they "
            "belong together; use the model's repository in Hugging Face's layout"
        )
    return found


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = _load_safely(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors, which could run code when it is read "
            f"({_first_line(error)}). Get the model from somebody who publishes it as safetensors"
        ) from error
    except Exception as error:  # zip files, their directories and the pickles in them fail in many ways
        raise CheckpointError(f"{path} can't be read: {_first_line(error)}; fetch it again") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise UnsupportedModelError(
            f"{path} is no dictionary of tensors but a {type(loaded).__name__} of something else; use the "
            "model's repository in Hugging Face's layout"
        )
    for name, value in loaded.items():
        if value.dtype not in _DTYPES or value.layout is not torch.strided or value.is_quantized:
            raise UnsupportedModelError(
                f"{path}: tensor {name[:200]!r} is {value.dtype}, {value.layout}, which safetensors can't "
                "hold"
            )
    return dict(loaded)


def _load_safely(path: Path) -> Any:
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # the kind that is a zip archive
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), None)
    return (named or (lines[0] if lines else type(error).__name__))[:300]


def _are_one(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()
    )
