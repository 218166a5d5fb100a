"""What config.json says of quantised weights, and what a way of packing them has to offer.

Rule: which tensors are packed, and how, is read from the tensors. The config says what they don't, and
where it contradicts them the model is refused: never read one way while it was meant another.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.weights.quantized.packed import PackedTensors

Bytes = npt.NDArray[np.uint8]
KEY = "quantization_config"
#: Weights are unpacked in pieces of about so many: what is between the steps stays in a core's cache, which
#: makes some of them several times as fast as with megabytes.
PIECE_WEIGHTS = 1 << 18
WAY_OUT = "use the model's unquantised directory, or a GGUF file of it"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a packed weight is read. type_name: a stored type of `quantization.formats`; how: in words."""

    type_name: str
    how: str


class PackedWeight(abc.ABC):
    """A matrix that several tensors of a file hold together, or a piece of one. It is a `TensorInfo`.

    name: what it is called unpacked. shape: (rows, K), or (rows,) of a vector. parts: the tensors that hold
    it.
    """

    def __init__(self, name: str, shape: tuple[int, ...], parts: Collection[str]) -> None:
        self.name = name
        self.shape = shape
        self.parts = frozenset(parts)

    @functools.cached_property
    @abc.abstractmethod
    def reading(self) -> Reading:
        """How it is read. Its scales decide, so they are read here; CheckpointError where they can't be."""

    @property
    def is_read(self) -> bool:
        """Whether somebody asked how."""
        return "reading" in self.__dict__

    @property
    def type_name(self) -> str:
        """The stored type of `rows`."""
        return self.reading.type_name

    @abc.abstractmethod
    def rows(self) -> Bytes:
        """uint8 [rows, nbytes of a row], in memory of their own."""


class Scheme(abc.ABC):
    """A way of packing weights, as one config.json describes it. label: it in words."""

    label: str

    @abc.abstractmethod
    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """The packed matrices of a directory. CheckpointError for parts that miss or don't fit together."""

    def is_idle(self, name: str, tensors: PackedTensors) -> bool:
        """Whether a tensor changes nothing that is computed here."""
        return False

    def unapplied(self, tensors: PackedTensors) -> list[str]:
        """What is quantised besides weights, and is not here."""
        return []


def row_chunks(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive rows, about PIECE_WEIGHTS in all; each start is a multiple of 32."""
    step = max(1, PIECE_WEIGHTS // width // 32) * 32
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


class Fields:
    """A JSON object of the config; errors name its keys. where: the keys that lead to it."""

    def __init__(self, values: dict[str, Any], path: Path, where: str = KEY) -> None:
        self.values = values
        self._path = path
        self._where = where

    def get(self, key: str) -> Any:
        """A value as it is; None if there is none."""
        return self.values.get(key)

    def choice(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value that is one of some; a name in any case."""
        value = self.get(key)
        if value is None:
            value = default
        if isinstance(value, str):
            value = value.lower()
        # 1 == True and 4 == 4.0, but neither was meant.
        if not any(value == one and type(value) is type(one) for one in allowed):
            self.refuse(key, f"served are {', '.join(map(repr, allowed))}")
        return value

    def size(self, key: str) -> int:
        """A number of at least 1."""
        value = self.get(key)
        if type(value) is not int or not 1 <= value < 2**31:
            self.refuse(key, "served are numbers of at least 1")
        return value

    def refuse_if_set(self, *keys: str) -> None:
        """Refuse what changes the weights' meaning in ways that are not served."""
        for key in keys:
            if self.get(key):
                self.refuse(key, "not served")

    def object(self, key: str) -> Fields:
        """A nested object; an empty one if there is none."""
        value = {} if self.get(key) is None else self.get(key)
        if not isinstance(value, dict):
            self.refuse(key, "only an object makes sense")
        return Fields(value, self._path, f"{self._where}.{key}")

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise UnsupportedModelError for the value of a key."""
        raise UnsupportedModelError(
            f"{self._path}: {self._where}.{key} is {str(self.get(key))[:200]!r}; {why}. Else {WAY_OUT}"
        )
