"""The tensors that quantisers write, as arrays.

Rule: nothing is believed of a tensor's shape or type before `expect` has checked it. Errors name the file
and the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModelError
from octavo.quantization.conversion import dequantize
from octavo.weights.safetensors import SafetensorsFile

FLOATS = ("F16", "BF16", "F32")
_INTEGERS = {"I8": "<i1", "I32": "<i4", "I64": "<i8"}


class PackedTensors:
    """The tensors of a directory, whichever of its files they are in."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files

    def __contains__(self, name: object) -> bool:
        return name in self._files

    @property
    def names(self) -> Iterable[str]:
        """All of them."""
        return self._files

    def ending(self, suffix: str) -> Iterator[str]:
        """The tensors' names that end so, without the ending."""
        return (name.removesuffix(suffix) for name in self._files if name.endswith(suffix))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._files[name].tensors[name].shape

    def dtype(self, name: str) -> str:
        """A tensor's type."""
        return self._files[name].tensors[name].type_name

    def require(self, name: str, beside: str) -> str:
        """The name itself; CheckpointError if there is no such tensor, though there is the other one."""
        if name not in self._files:
            self.fail(beside, f"comes without {name[:200]!r}")
        return name

    def expect(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> None:
        """Raise CheckpointError unless a tensor has one of these types, and this shape."""
        if self.dtype(name) not in dtypes:
            self.fail(name, f"is {self.dtype(name)}; it must be {' or '.join(dtypes)}")
        if shape is not None and self.shape(name) != shape:
            self.fail(name, f"has shape {self.shape(name)}; what it belongs to makes it {shape}")

    def matrix(self, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
        """The shape of a matrix of one of these types; CheckpointError for anything else, or an empty one."""
        self.expect(name, dtypes)
        shape = self.shape(name)
        if len(shape) != 2 or not all(shape):
            self.fail(name, f"has shape {shape}; it must be a matrix")
        return shape[0], shape[1]

    def integers(self, name: str) -> npt.NDArray[Any]:
        """The values of an I8, I32 or I64 tensor: a view onto the file."""
        raw = self.raw(name).reshape(-1)
        return raw.view(_INTEGERS[self.dtype(name)]).reshape(self.shape(name))

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """The values of a tensor of FLOATS. CheckpointError if one is not finite."""
        values = dequantize(self.raw(name), self.dtype(name)).reshape(self.shape(name))
        if not np.isfinite(values).all():
            self.fail(name, "has values that are not finite; the file is damaged")
        return values

    def group_indices(self, name: str, num_groups: int) -> npt.NDArray[Any]:
        """The values of an I32 tensor; CheckpointError if one is no group, of so many."""
        found = self.integers(name)
        if found.min() < 0 or found.max() >= num_groups:
            self.fail(name, f"names groups {found.min()} to {found.max()}; there are {num_groups}, from 0")
        return found

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """uint8 [rows, nbytes of a row], a view onto the file."""
        return self._files[name].raw(name)

    def release(self, name: str) -> None:
        """Let go of the pages that were read of a tensor, if there is such a one."""
        if name in self._files:
            self._files[name].release(name)

    def fail(
        self, name: str, problem: str, error: type[CheckpointError | UnsupportedModelError] = CheckpointError
    ) -> NoReturn:
        """Raise for a tensor."""
        raise error(f"{self._files[name].path}: tensor {name[:200]!r} {problem}")
