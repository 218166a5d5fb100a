"""How weights lie in memory, and what that costs.

Rule: a format is named after what a group of weights shares. Groups run along K, the reduction
dimension, and hold 32 weights.

    q4m   w = d * q + m          q: 4 bit, d, m: f16   5   bit a weight   (GGUF Q4_1)
    q8    w = d * q              q: int8,  d: f16      8.5 bit            (GGUF Q8_0)
    f32   w                                            32  bit
"""

from __future__ import annotations

import enum

GROUP = 32


class Format(enum.StrEnum):
    """The element format of a weight."""

    Q4M = "q4m"
    Q8 = "q8"
    F32 = "f32"

    @property
    def quantized(self) -> bool:
        """Whether weights come in groups that share a scale."""
        return self is not Format.F32

    @property
    def group_nbytes(self) -> int:
        """Bytes of one row's group of 32 weights, scales included."""
        return {Format.Q4M: 16 + 2 + 2, Format.Q8: 32 + 2, Format.F32: 4 * GROUP}[self]


#: The format that holds each GGUF tensor type without loss.
GGUF_FORMATS = {"Q4_1": Format.Q4M, "Q8_0": Format.Q8, "F32": Format.F32}
