"""Rotary tables, in float64.

Rule: one table for every device and every step; angles are never recomputed in lower precision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.program.ir import RopeTable


def inverse_frequencies(rotary_dim: int, theta: float) -> tuple[float, ...]:
    """theta ** (-2 i / rotary_dim) for i < rotary_dim / 2: radians per position (Su et al., RoFormer)."""
    return tuple(theta ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2))


def cos_sin(table: RopeTable) -> npt.NDArray[np.float32]:
    """[max_positions, rotary_dim] f32: cos, then sin."""
    angles = np.outer(np.arange(table.max_positions, dtype=np.float64), np.array(table.inv_freq))
    values = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * table.scale
    return values.astype(np.float32)
