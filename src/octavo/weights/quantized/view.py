"""A directory's packed weights as the matrices they are.

Rule: the tensors that hold a packed weight disappear, and the weight takes their place under its own name;
one is unpacked at a time, when it is asked for. What no weight takes stays, to be refused by its name if the
model has no use for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.weights.checkpoint import TensorFile
from octavo.weights.quantized.awq import AwqScheme
from octavo.weights.quantized.compressed import CompressedScheme
from octavo.weights.quantized.float8 import Float8Scheme
from octavo.weights.quantized.gpt_oss import GptOssScheme
from octavo.weights.quantized.gptq import GptqScheme
from octavo.weights.quantized.packed import PackedTensors
from octavo.weights.quantized.scheme import KEY, WAY_OUT, Fields, PackedWeight, Scheme
from octavo.weights.safetensors import SafetensorsFile

_SCHEMES: Mapping[str, Callable[[Fields], Scheme]] = {
    "gptq": GptqScheme,
    "awq": AwqScheme,
    "fp8": Float8Scheme,
    "compressed-tensors": CompressedScheme,
}


class QuantizedView:
    """The packed weights of a directory, a `TensorFile`. files: where each tensor that stays, and each
    weight, is read."""

    def __init__(self, path: Path, scheme: Scheme, stored: Mapping[str, SafetensorsFile]) -> None:
        self.path = path
        self._scheme = scheme
        self._stored = PackedTensors(stored)
        self.tensors: dict[str, PackedWeight] = {}
        self.files: dict[str, TensorFile] = dict(stored)
        for weight in scheme.weights(self._stored):
            if weight.name in self.tensors:
                raise CheckpointError(f"{path}: {weight.name[:200]!r} is packed twice, in different ways")
            self.tensors[weight.name] = weight
        for name in (part for weight in self.tensors.values() for part in weight.parts):
            self.files.pop(name, None)
        for name in self.tensors:
            if name in self.files:
                raise CheckpointError(f"{path}: {name[:200]!r} is there both packed and unpacked")
            self.files[name] = self

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """uint8 [rows, nbytes of a row], unpacked for this call."""
        return self.tensors[name].rows()

    def release(self, name: str) -> None:
        """Let go of the pages of the tensors that hold it."""
        for part in self.tensors[name].parts:
            self._stored.release(part)

    def without_idle(self, names: Collection[str]) -> set[str]:
        """Of these tensors, those that change what is computed."""
        return {name for name in names if not self._scheme.is_idle(name, self._stored)}

    @property
    def notes(self) -> list[str]:
        """How the weights that were asked for are read, and what is not done, a line each."""
        # Those that were asked for have their reading cached, and are listed without work.
        read = Counter(weight.reading.how for weight in self.tensors.values() if weight.is_read)
        notes = []
        if read:
            ways = "; ".join(f"{count} as {how}" for how, count in sorted(read.items()))
            notes.append(f"{self.path.name}: weights stored as {self._scheme.label}, read: {ways}")
        if left := self._scheme.unapplied(self._stored):
            notes.append(
                f"{self.path.name}: its {KEY} is for {' and '.join(left)} too; they are not quantised so"
            )
        return notes


def open_quantized(
    config: Mapping[str, Any], path: Path, stored: Mapping[str, SafetensorsFile]
) -> QuantizedView | None:
    """The packed weights of a directory; None if its config.json names no quantisation, nor a model that
    packs weights anyway.

    path: of config.json. stored: the file of each tensor. Raises UnsupportedModelError for what is not
    served, and CheckpointError for packed tensors that miss or don't fit together.
    """
    values = config.get(KEY)
    if config.get("model_type") == "gpt_oss" and _method(values) in ("", "mxfp4"):
        return QuantizedView(path.parent, GptOssScheme(), stored)
    if not values:
        return None
    method = values.get("quant_method") if isinstance(values, dict) else values
    if not isinstance(method, str) or method.lower() not in _SCHEMES:
        raise UnsupportedModelError(
            f"{path}: the weights are quantised by {str(method)[:80]!r}, which is not served; served are "
            f"{', '.join(_SCHEMES)}. Else {WAY_OUT}"
        )
    return QuantizedView(path.parent, _SCHEMES[method.lower()](Fields(values, path)), stored)


def _method(values: object) -> str:
    """The method that a quantization_config names."""
    return str(values.get("quant_method", "")).lower() if isinstance(values, dict) else ""
