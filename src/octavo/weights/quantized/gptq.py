"""GPTQ's packing: fields along K in the words of qweight, scales and zero points a row for each group.

    qweight  I32 [K bits / 32, N]   the first of the columns of W that a word holds in its lowest bits
    qzeros   I32 [G, N bits / 32]
    scales   F16 [G, N]
    g_idx    I32 [K]                the group of each column, where desc_act made groups of any columns

Rule: "gptq" and "gptq_v2" (checkpoint_format) differ in that the first stores zero points less one. A
stored 2^bits - 1 is read by some programs as 0 and by some as 2^bits, and next to it a borrow may have
changed the others; it is refused. Source: AutoGPTQ and GPTQModel, which write these files.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.errors import UnsupportedModelError
from octavo.weights.quantized.integers import Floats, Integers, IntegerWeight, unpack
from octavo.weights.quantized.packed import FLOATS, PackedTensors
from octavo.weights.quantized.scheme import WAY_OUT, Fields, PackedWeight, Scheme


class GptqScheme(Scheme):
    """quant_method "gptq"."""

    def __init__(self, fields: Fields) -> None:
        self.bits: int = fields.choice("bits", (4, 8))
        self.group_size = read_group_size(fields)
        # GPTQModel writes both keys, of the same meaning.
        key = "format" if fields.get("checkpoint_format") is None else "checkpoint_format"
        layout = fields.choice(key, ("gptq", "gptq_v2"), "gptq")
        fields.choice("format", (layout,), layout)
        self.stored_less_one = layout == "gptq"
        self.symmetric: bool = fields.choice("sym", (True, False), False)
        self.reordered: bool = fields.choice("desc_act", (True, False), False)
        fields.choice("pack_dtype", ("int32",), "int32")
        fields.refuse_if_set("is_marlin_format", "rotation", "adapter")
        self.label = f"GPTQ int{self.bits} {described_groups(self.group_size)}"

    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """One for each qweight."""
        return (GptqWeight(tensors, module, self) for module in tensors.ending(".qweight"))

    def is_idle(self, name: str, tensors: PackedTensors) -> bool:
        """AutoGPTQ writes biases of layers that have none, as zeros."""
        if not name.endswith(".bias") or f"{name.removesuffix('.bias')}.qweight" not in tensors:
            return False
        return tensors.dtype(name) in FLOATS and not tensors.floats(name).any()


class GptqWeight(IntegerWeight):
    """One layer's qweight, qzeros, scales and g_idx."""

    def __init__(self, tensors: PackedTensors, module: str, scheme: GptqScheme) -> None:
        self.bits = scheme.bits
        self._tensors, self._scheme = tensors, scheme
        self._qweight = f"{module}.qweight"
        self._qzeros = tensors.require(f"{module}.qzeros", self._qweight)
        self._scales = tensors.require(f"{module}.scales", self._qweight)
        self._g_idx = f"{module}.g_idx"
        words, num_rows = tensors.matrix(self._qweight, ("I32",))
        fields = 32 // self.bits
        super().__init__(
            f"{module}.weight",
            (num_rows, words * fields),
            {self._qweight, self._qzeros, self._scales, self._g_idx},
        )
        self._num_groups = count_groups(self.shape[1], scheme.group_size)
        tensors.expect(self._scales, FLOATS, (self._num_groups, num_rows))
        tensors.expect(self._qzeros, ("I32",), (self._num_groups, -(-num_rows // fields)))
        if self._g_idx in tensors:
            tensors.expect(self._g_idx, ("I32",), (self.shape[1],))
        elif scheme.reordered:
            tensors.require(self._g_idx, self._qweight)

    def codes(self, start: int, stop: int) -> Integers:
        """See IntegerWeight."""
        return unpack(self._tensors.integers(self._qweight)[:, start:stop].T, self.bits)

    def scales(self) -> Floats:
        """See IntegerWeight."""
        return self._tensors.floats(self._scales).T

    def zeros(self) -> Integers:
        """See IntegerWeight."""
        stored = unpack(self._tensors.integers(self._qzeros), self.bits)[:, : self.shape[0]]
        zeros = stored.T.astype(np.int16)
        if self._scheme.stored_less_one:
            largest = (1 << self.bits) - 1
            if (zeros == largest).any():
                self._tensors.fail(
                    self._qzeros,
                    f"has zero points stored as {largest}, which are 0 or {largest + 1} by the program that "
                    "reads them. Convert the model to the checkpoint_format gptq_v2 with the program that "
                    f"wrote it, or {WAY_OUT}",
                    UnsupportedModelError,
                )
            zeros += 1
        if self._scheme.symmetric:
            expect_symmetric(self._tensors, self._qzeros, zeros, self.middle, "sym is true")
        return zeros

    def group_of(self) -> Integers:
        """See IntegerWeight."""
        group_size = self._scheme.group_size or self.shape[1]
        in_order = np.arange(self.shape[1]) // group_size
        if self._g_idx not in self._tensors:
            return in_order
        found = self._tensors.group_indices(self._g_idx, self._num_groups)
        if not self._scheme.reordered and (found != in_order).any():
            self._tensors.fail(self._g_idx, "reorders columns, but desc_act is not true in config.json")
        return found


def read_group_size(fields: Fields) -> int | None:
    """Columns of a group; None where all of them are one."""
    return None if fields.get("group_size") == -1 else fields.size("group_size")


def described_groups(group_size: int | None) -> str:
    """In words."""
    return "in one group a row" if group_size is None else f"in groups of {group_size}"


def count_groups(width: int, group_size: int | None) -> int:
    """Groups of a row, of which the last may be shorter."""
    return 1 if group_size is None else -(-width // group_size)


def expect_symmetric(tensors: PackedTensors, name: str, zeros: Integers, middle: int, claim: str) -> None:
    """Raise CheckpointError unless all zero points are the middle: then the file is of another layout than
    its config says, or programs that trust the config read other weights."""
    if (zeros != middle).any():
        other = zeros[zeros != middle].flat[0]
        tensors.fail(name, f"holds a zero point of {other}, but {claim} in config.json, which means {middle}")
