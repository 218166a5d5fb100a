"""AWQ's packing in its "gemm" version: fields along N, eight to a word, out of order.

    qweight  I32 [K, N / 8]   field i of a word is output 8 j + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   I32 [G, N / 8]   likewise
    scales   F16 [G, N]

Source: AutoAWQ, which writes these files.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.weights.quantized.gptq import (
    count_groups,
    described_groups,
    expect_symmetric,
    read_group_size,
)
from octavo.weights.quantized.integers import Floats, Integers, IntegerWeight, unpack
from octavo.weights.quantized.packed import FLOATS, PackedTensors
from octavo.weights.quantized.scheme import Fields, PackedWeight, Scheme

_FIELDS = 8
#: Where output 8 j + i lies in its word.
_FIELD_OF = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


class AwqScheme(Scheme):
    """quant_method "awq"."""

    def __init__(self, fields: Fields) -> None:
        fields.choice("bits", (4,))
        self.group_size = read_group_size(fields)
        # transformers writes one or both, of the same meaning.
        fields.choice("version", ("gemm",), "gemm")
        fields.choice("format", ("gemm",), "gemm")
        if fields.get("backend") == "llm-awq":
            fields.refuse("backend", "its files are packed in another way")
        self.symmetric: bool = not fields.choice("zero_point", (True, False), True)
        self.label = f"AWQ int4 {described_groups(self.group_size)}"

    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """One for each qweight."""
        return (AwqWeight(tensors, module, self) for module in tensors.ending(".qweight"))


class AwqWeight(IntegerWeight):
    """One layer's qweight, qzeros and scales."""

    bits = 4

    def __init__(self, tensors: PackedTensors, module: str, scheme: AwqScheme) -> None:
        self._tensors, self._scheme = tensors, scheme
        self._qweight = f"{module}.qweight"
        self._qzeros = tensors.require(f"{module}.qzeros", self._qweight)
        self._scales = tensors.require(f"{module}.scales", self._qweight)
        width, words = tensors.matrix(self._qweight, ("I32",))
        super().__init__(
            f"{module}.weight", (words * _FIELDS, width), {self._qweight, self._qzeros, self._scales}
        )
        num_groups = count_groups(width, scheme.group_size)
        tensors.expect(self._scales, FLOATS, (num_groups, self.shape[0]))
        tensors.expect(self._qzeros, ("I32",), (num_groups, words))

    def codes(self, start: int, stop: int) -> Integers:
        """See IntegerWeight."""
        words = self._tensors.integers(self._qweight)[:, start // _FIELDS : stop // _FIELDS]
        return np.ascontiguousarray(_unpack_in_order(words).T)

    def scales(self) -> Floats:
        """See IntegerWeight."""
        return self._tensors.floats(self._scales).T

    def zeros(self) -> Integers:
        """See IntegerWeight."""
        zeros = _unpack_in_order(self._tensors.integers(self._qzeros)).T
        if self._scheme.symmetric:
            expect_symmetric(self._tensors, self._qzeros, zeros, self.middle, "zero_point is false")
        return zeros

    def group_of(self) -> Integers:
        """See IntegerWeight."""
        return np.arange(self.shape[1]) // (self._scheme.group_size or self.shape[1])


def _unpack_in_order(words: Integers) -> npt.NDArray[np.uint8]:
    fields = unpack(words, 4).reshape(len(words), -1, _FIELDS)
    return fields[:, :, _FIELD_OF].reshape(len(words), -1)
