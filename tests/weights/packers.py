"""Writes directories as quantisers do, field by field as their formats are described.

`quantize_directory` rewrites a directory of `make_llama_directory` and gives its oracle the weights that the
packed ones stand for, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.backends.native import library
from octavo.config.resolve import resolve
from octavo.errors import ModelLoadError
from octavo.runner.model_runner import ModelRunner
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.quantized import scheme
from tiny_models import TinyModel, make_llama_directory

SINGLE = "model.safetensors"
Tensors = dict[str, torch.Tensor]
Array = npt.NDArray[Any]


# -- quantising ---------------------------------------------------------------------------------------


@dataclass
class Quantized:
    """w = s (q - z), q of 0 .. 2^bits - 1. q [N, K]; s, z [N, G]; group_of [K]."""

    bits: int
    q: Array
    s: Array
    z: Array
    group_of: Array

    @property
    def values(self) -> npt.NDArray[np.float64]:
        s, z = self.s[:, self.group_of], self.z[:, self.group_of]
        result: npt.NDArray[np.float64] = s.astype(np.float64) * (self.q.astype(np.float64) - z)
        return result


def quantize(
    weight: Array, bits: int, group_of: Array, *, symmetric: bool, dtype: torch.dtype = torch.float16
) -> Quantized:
    """To the nearest, with scales of a type; symmetric: with the middle as zero point."""
    top, num_groups = (1 << bits) - 1, int(group_of.max()) + 1
    s, z = np.empty((len(weight), num_groups), np.float32), np.empty((len(weight), num_groups), np.int64)
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = np.abs(part).max(1) / (1 << (bits - 1)) if symmetric else (high - low) / top
        s[:, group] = torch.from_numpy(scale).to(dtype).float().numpy()
        # Not 0, which "gptq" can't store.
        z[:, group] = 1 << (bits - 1) if symmetric else np.clip(np.rint(-low / s[:, group]), 1, top - 1)
    q = np.clip(np.rint(weight / s[:, group_of]) + z[:, group_of], 0, top).astype(np.int64)
    return Quantized(bits, q, s, z, group_of)


def groups(width: int, size: int | None) -> Array:
    return np.arange(width) // (size or width)


def words(fields: Array, bits: int) -> torch.Tensor:
    """Fields [rows, columns] into I32, the first in a word's lowest bits."""
    rows, columns = fields.shape
    count = 32 // bits
    packed = np.zeros((rows, -(-columns // count)), np.uint32)
    for column in range(columns):
        packed[:, column // count] |= fields[:, column].astype(np.uint32) << np.uint32(
            bits * (column % count)
        )
    return torch.from_numpy(packed.view(np.int32))


# -- packing ------------------------------------------------------------------------------------------


def gptq(name: str, w: Quantized, dtype: torch.dtype = torch.float16, *, less_one: bool = True) -> Tensors:
    return {
        f"{name}.qweight": words(w.q, w.bits).T.contiguous(),
        f"{name}.qzeros": words(w.z.T - less_one, w.bits),
        f"{name}.scales": torch.from_numpy(w.s.T.copy()).to(dtype),
        f"{name}.g_idx": torch.from_numpy(w.group_of.astype(np.int32)),
    }


def awq(name: str, w: Quantized) -> Tensors:
    def interleaved(fields: Array) -> torch.Tensor:
        ordered = fields.reshape(len(fields), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(ordered.reshape(fields.shape), 4)

    return {
        f"{name}.qweight": interleaved(w.q.T),
        f"{name}.qzeros": interleaved(w.z.T),
        f"{name}.scales": torch.from_numpy(w.s.T.copy()).half(),
    }


def pack_quantized(name: str, w: Quantized, dtype: torch.dtype, *, symmetric: bool) -> Tensors:
    tensors = {
        f"{name}.weight_packed": words(w.q, w.bits),
        f"{name}.weight_scale": torch.from_numpy(w.s.copy()).to(dtype),
        f"{name}.weight_shape": torch.tensor(w.q.shape),
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = words(w.z.T, w.bits).T.contiguous()
    return tensors


# -- directories --------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Tensors], object]) -> None:
    """Let a function change the tensors of a directory."""
    tensors = load_file(path / SINGLE)
    change(tensors)
    (path / SINGLE).unlink()
    save_file(tensors, path / SINGLE)


def edit_config(path: Path, **values: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def quantize_directory(
    path: Path,
    quantization: dict[str, Any],
    pack: Callable[[str, Array], tuple[Tensors, Array]],
    **overrides: Any,
) -> TinyModel:
    """A directory whose layers' matrices are what `pack` makes of a module's name and weight: tensors, and
    the values they stand for."""
    tiny = make_llama_directory(path, **overrides)
    edit_config(path, quantization_config=quantization)

    def change(tensors: Tensors) -> None:
        for name, parameter in tiny.model.named_parameters():
            if parameter.ndim != 2 or "layers" not in name:
                continue
            packed, values = pack(name.removesuffix(".weight"), tensors.pop(name).numpy())
            tensors.update(packed)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(np.asarray(values, np.float64)))

    rewrite(path, change)
    return tiny


def matrices(tiny: TinyModel) -> dict[str, npt.NDArray[np.float64]]:
    """The layers' matrices, as the oracle has them."""
    return {
        name: parameter.detach().numpy().copy()
        for name, parameter in tiny.model.named_parameters()
        if parameter.ndim == 2 and "layers" in name
    }


def held(tiny: TinyModel) -> tuple[set[str], dict[str, npt.NDArray[np.float32]], list[str]]:
    """Types and values that the checkpoint gives for the layers' matrices, and its notes afterwards."""
    checkpoint = open_checkpoint(tiny.path)
    found = {name: checkpoint.rows(name, value.shape) for name, value in matrices(tiny).items()}
    types = {rows.type_name for rows in found.values()}
    values = {name: rows.dequantize() for name, rows in found.items()}
    with pytest.MonkeyPatch.context() as patch:  # matrices this small are one piece else
        patch.setattr(scheme, "PIECE_WEIGHTS", 1)
        for name, rows in found.items():
            np.testing.assert_array_equal(rows.dequantize(), values[name])
    notes = checkpoint.notes
    checkpoint.close()
    return types, values, notes


def assert_logits(tiny: TinyModel) -> None:
    """Two bounds, as in tests/models/test_llama_types.py: within float32's rounding of the oracle with the
    weights as they are held (and natively of integer activations' and f16 KV's); and, in norm, within what
    holding them so changed of the oracle with the packed ones."""
    ids = np.random.default_rng(1).integers(0, 262, (2, 30)).tolist()
    stored, before = tiny.logits(ids), matrices(tiny)
    _, values, _ = held(tiny)
    moved = 0.0
    with torch.no_grad():
        for name, parameter in tiny.model.named_parameters():
            if name in values:
                moved += 2 * np.linalg.norm(values[name] - before[name]) / np.linalg.norm(before[name])
                parameter.copy_(torch.from_numpy(values[name].astype(np.float64)))
        expected = tiny.logits(ids)
        for name, parameter in tiny.model.named_parameters():
            if name in values:
                parameter.copy_(torch.from_numpy(before[name]))
    assert stored.std() > 0.5, "a model whose logits are all alike tests nothing"
    rounding = (20 * 130 + 30 * 13) * 2.0**-24 * np.abs(expected).max()
    found = predict(tiny.path, ids, "torch")
    assert np.abs(found - expected).max() < rounding
    allowed = (moved + rounding / np.abs(expected).max()) * np.linalg.norm(stored)
    assert np.linalg.norm(found - stored) < allowed
    if library.available():
        native = predict(tiny.path, ids, "native")
        steps = 4 * tiny.model.config.num_hidden_layers + 2
        assert np.abs(native - expected).max() < steps * 2.0**-11 * np.abs(expected).max() + rounding


def predict(path: Path, ids: list[list[int]], backend: str = "torch") -> npt.NDArray[np.float32]:
    settings = {"backend": backend, "threads": 1, "max_model_len": 32, "activation_bits": "16"}
    runner = ModelRunner(path, resolve(settings).config)
    try:
        return runner.predict(ids)
    finally:
        runner.close()


def assert_refused(path: Path, error: type[ModelLoadError], message: str) -> None:
    with pytest.raises(error, match=message):
        predict(path, [[1]])
