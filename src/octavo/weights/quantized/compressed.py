"""compressed-tensors' packing, which llm-compressor writes.

    pack-quantized    weight_packed      I32 [N, K bits / 32]   fields along K, the first in the lowest bits
                      weight_shape       I64 [2]                N, K
    int-, float- and
    naive-quantized   weight             I8 or F8 [N, K]
    all               weight_scale       a float for each cell of a grid
                      weight_zero_point  I8 like the scales; beside weight_packed packed too, along N
                      weight_g_idx       I32 [K]: with actorder "group", the group of each column

Packed integers and zero points have 2^(bits - 1) added. Rule: each weight must be one that config_groups
describe; which names they are for (targets, ignore) need not be asked, since the tensors say it.

Source: the compressed-tensors package.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from octavo.weights.quantized.float8 import (
    FLOAT8,
    Float8Weight,
    has_kv_scales,
    is_of_activations,
    read_block,
)
from octavo.weights.quantized.grid import Grid, counts
from octavo.weights.quantized.integers import Floats, Integers, IntegerWeight, unpack
from octavo.weights.quantized.packed import FLOATS, PackedTensors
from octavo.weights.quantized.scheme import Fields, PackedWeight, Scheme

_FORMATS = (
    *("dense", "mixed-precision"),
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
)
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class WeightArgs:
    """How config_groups say that some weights are quantised. cell: rows and columns that share a scale,
    None for all there are."""

    bits: int
    is_float: bool
    symmetric: bool
    cell: tuple[int | None, int | None]
    reordered: bool

    def grid(self, shape: tuple[int, int], scales: tuple[int, ...]) -> Grid | None:
        """The cells of a matrix, if scales of this shape are theirs. Parts of rows are equal."""
        grid = Grid.of(shape, *self.cell)
        ragged = self.cell[0] == 1 and shape[1] % grid.columns != 0
        return grid if grid.cells == counts(scales) and not ragged else None

    def describe(self) -> str:
        """In words."""
        rows, columns = self.cell
        if columns is None:
            shared = f"with one scale a {'tensor' if rows is None else 'row'}"
        else:
            shared = f"in groups of {columns}" if rows == 1 else f"in blocks of {rows}x{columns}"
        return f"{'float' if self.is_float else 'int'}{self.bits} {shared}"


class CompressedScheme(Scheme):
    """quant_method "compressed-tensors"."""

    def __init__(self, fields: Fields) -> None:
        layout = fields.choice("format", _FORMATS, "mixed-precision")
        fields.object("sparsity_config").choice("format", ("dense",), "dense")
        fields.refuse_if_set("moe_sparsity_config")
        transforms = fields.object("transform_config")
        transforms.refuse_if_set(*transforms.values)
        self.args: list[WeightArgs] = []
        groups = fields.object("config_groups")
        self._quantizes_activations = False
        for name in groups.values:
            group = groups.object(name)
            group.choice("format", _FORMATS, "mixed-precision")
            for key in ("input_activations", "output_activations"):
                self._quantizes_activations |= group.get(key) is not None
            if group.get("weights") is not None:
                self.args.append(_read_args(group.object("weights")))
        self._quantizes_kv = fields.get("kv_cache_scheme") is not None
        described = dict.fromkeys(args.describe() for args in self.args)
        self.label = f"compressed-tensors {', '.join(described)} ({layout})"

    def weights(self, tensors: PackedTensors) -> Iterator[PackedWeight]:
        """One for each weight_packed, and for each matrix of I8 or FP8."""
        for module in tensors.ending(".weight_packed"):
            yield CompressedInts(tensors, module, self.args, packed=True)
        for module in tensors.ending(".weight"):
            weight = f"{module}.weight"
            if len(tensors.shape(weight)) != 2:
                continue
            if tensors.dtype(weight) == "I8":
                yield CompressedInts(tensors, module, self.args, packed=False)
            elif tensors.dtype(weight) in FLOAT8:
                yield self._float8(tensors, module)

    def _float8(self, tensors: PackedTensors, module: str) -> PackedWeight:
        weight = f"{module}.weight"
        scale = tensors.require(f"{module}.weight_scale", weight)
        shape, scales = tensors.matrix(weight, FLOAT8), tensors.shape(scale)
        grids = {args.grid(shape, scales) for args in self.args if args.is_float} - {None}
        if len(grids) != 1:
            _refuse(tensors, weight, [scale], self.args)
        return Float8Weight(tensors, weight, scale, [grid for grid in grids if grid])

    def is_idle(self, name: str, tensors: PackedTensors) -> bool:
        """See Scheme."""
        return is_of_activations(name)

    def unapplied(self, tensors: PackedTensors) -> list[str]:
        """See Scheme."""
        activations = ["activations"] if self._quantizes_activations else []
        return activations + (["the KV cache"] if self._quantizes_kv or has_kv_scales(tensors) else [])


class CompressedInts(IntegerWeight):
    """One layer's integers, packed or not, with their scales."""

    def __init__(self, tensors: PackedTensors, module: str, args: list[WeightArgs], *, packed: bool) -> None:
        self._tensors = tensors
        self.signed = not packed
        self._quants = f"{module}.weight_packed" if packed else f"{module}.weight"
        self._scale = tensors.require(f"{module}.weight_scale", self._quants)
        self._zero_point = f"{module}.weight_zero_point"
        self._g_idx = f"{module}.weight_g_idx"
        parts = {self._quants, self._scale, self._zero_point, self._g_idx}
        if packed:
            parts.add(f"{module}.weight_shape")
            shape = self._read_shape(tensors.require(f"{module}.weight_shape", self._quants))
        else:
            shape = tensors.matrix(self._quants, ("I8",))
        super().__init__(f"{module}.weight", shape, parts)
        self.bits, self._grid = self._choose(args)
        self._check_parts()

    def _read_shape(self, name: str) -> tuple[int, int]:
        self._tensors.expect(name, ("I64", "I32"), (2,))
        rows, columns = (int(value) for value in self._tensors.integers(name))
        if self._tensors.matrix(self._quants, ("I32",))[0] != rows or columns < 1:
            self._tensors.fail(name, f"says {rows}x{columns}, which weight_packed does not have")
        return rows, columns

    def _choose(self, args: list[WeightArgs]) -> tuple[int, Grid]:
        """Bits and cells, of the args that fit the tensors there are."""
        tensors, chosen = self._tensors, set()
        rows, columns = self.shape
        for one in args:
            grid = one.grid((rows, columns), tensors.shape(self._scale))
            if (
                grid is not None
                and not one.is_float
                and (self.signed or tensors.shape(self._quants)[1] == _words(self.shape[1], one.bits))
                and (one.symmetric or self._zero_point in tensors)
                and one.reordered == (self._g_idx in tensors)
            ):
                chosen.add((8 if self.signed else one.bits, grid))
        if len(chosen) != 1:
            beside = [name for name in (self._scale, self._zero_point, self._g_idx) if name in tensors]
            _refuse(tensors, self._quants, beside, args)
        return chosen.pop()

    def _check_parts(self) -> None:
        tensors, cells = self._tensors, self._grid.cells
        tensors.expect(self._scale, FLOATS)
        if self._zero_point in tensors:
            tensors.expect(self._zero_point, ("I8",) if self.signed else ("I8", "I32"))
            packed = tensors.dtype(self._zero_point) == "I32"
            wanted = (_words(cells[0], self.bits), cells[1]) if packed else cells
            if counts(tensors.shape(self._zero_point)) != wanted:
                tensors.expect(self._zero_point, ("I8", "I32"), wanted)
        if self._g_idx in tensors:
            tensors.expect(self._g_idx, ("I32",), (self.shape[1],))

    def codes(self, start: int, stop: int) -> Integers:
        """See IntegerWeight."""
        stored = self._tensors.integers(self._quants)[start:stop]
        return stored if self.signed else unpack(stored, self.bits)[:, : self.shape[1]]

    def scales(self) -> Floats:
        """See IntegerWeight."""
        return self._grid.of_rows(self._tensors.floats(self._scale))

    def zeros(self) -> Integers:
        """See IntegerWeight."""
        if self._zero_point not in self._tensors:
            return self._grid.of_rows(np.full(self._grid.cells, self.middle, np.int16))
        stored: Any = self._tensors.integers(self._zero_point)
        if self._tensors.dtype(self._zero_point) == "I32":
            return self._grid.of_rows(unpack(stored.T, self.bits)[:, : self._grid.cells[0]].T)
        return self._grid.of_rows(stored.astype(np.int16) + self.middle)

    def group_of(self) -> Integers:
        """See IntegerWeight."""
        if self._g_idx not in self._tensors:
            return self._grid.cell_of_columns()
        return self._tensors.group_indices(self._g_idx, self._grid.cells[1])


def _refuse(tensors: PackedTensors, name: str, beside: list[str], args: list[WeightArgs]) -> NoReturn:
    """For a weight that fits none of the args, or several of them in different ways."""
    parts = ", ".join(f"{part.rpartition('.')[2]} {list(tensors.shape(part))}" for part in beside)
    known = "; ".join(one.describe() for one in args) or "nothing"
    tensors.fail(
        name,
        f"{list(tensors.shape(name))} with {parts} does not fit just one of what "
        f"quantization_config.config_groups describe: {known}",
    )


def _words(fields: int, bits: int) -> int:
    """I32 that so many fields take."""
    return -(-fields * bits // 32)


def _read_args(fields: Fields) -> WeightArgs:
    """config_groups.*.weights."""
    kind = fields.choice("type", ("int", "float"), "int")
    bits = fields.choice("num_bits", (8,) if kind == "float" else (4, 8), 8)
    fields.refuse_if_set("dynamic")
    group_size = fields.get("group_size")
    default = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = fields.choice("strategy", _STRATEGIES, default)
    cell: tuple[int | None, int | None] | None = (1 if strategy == "channel" else None, None)
    if strategy == "group":
        cell = (1, fields.size("group_size"))
    elif strategy == "block":
        cell = read_block(fields, "block_structure")
    if cell is None:
        fields.refuse("block_structure", "served are two numbers")
    order = fields.choice("actorder", ("group", "dynamic", "weight", "static", True, False), False)
    return WeightArgs(
        bits=bits,
        is_float=kind == "float",
        symmetric=fields.choice("symmetric", (True, False), True),
        cell=cell,
        reordered=order in ("group", "dynamic", True),
    )
