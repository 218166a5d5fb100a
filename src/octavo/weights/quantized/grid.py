"""Scales over a matrix: which weights share one.

Rule: a matrix is cut into cells of so many rows and columns, from its first weight on; the last cells may
be smaller. A scale belongs to each cell.

    per tensor   [] or [1]               the whole matrix is a cell
    per channel  [N] or [N, 1]           a row
    groups       [N, K / size]           a part of a row
    blocks       [N / rows, K / columns] both rounded up
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a matrix [N, K]. rows, columns: of a cell, at least 1 and at most the matrix's."""

    shape: tuple[int, int]
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, int], rows: int | None, columns: int | None) -> Self:
        """Cells of so many rows and columns, of which None stands for all."""
        return cls(shape, min(rows or shape[0], shape[0]), min(columns or shape[1], shape[1]))

    @property
    def cells(self) -> tuple[int, int]:
        """How many there are, down and across."""
        return -(-self.shape[0] // self.rows), -(-self.shape[1] // self.columns)

    def of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """One value for each cell, repeated for every row: [N, cells across]."""
        by_cell = values.reshape(self.cells)
        if self.rows == 1:
            return by_cell
        return by_cell[np.arange(self.shape[0]) // self.rows]

    def cell_of_columns(self) -> npt.NDArray[np.int64]:
        """The cell across that each column is in, [K]."""
        return np.arange(self.shape[1]) // self.columns


def counts(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of scales as cells down and across, however it was written."""
    return {0: (1, 1), 1: (*shape, 1)}.get(len(shape), shape)
