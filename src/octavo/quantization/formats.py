"""How weights lie in memory, and what that costs.

Rule: a format is named after what a group of weights shares. Groups run along K, the reduction
dimension, and hold 32 weights.

    q4m   w = d * q + m          q: 4 bit, d, m: f16   5   bit a weight   (GGUF Q4_1)
    q8    w = d * q              q: int8,  d: f16      8.5 bit            (GGUF Q8_0)
    f16   w                                            16  bit
    bf16  w                                            16  bit
    f32   w                                            32  bit

A type that no format holds exactly goes to q8; `conversion` says how. Arithmetic is in f32 whatever the
plain format: weights are widened, exactly, as they are read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

GROUP = 32


class Format(enum.StrEnum):
    """The element format of a weight."""

    Q4M = "q4m"
    Q8 = "q8"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def quantized(self) -> bool:
        """Whether weights come in groups that share a scale; the other formats are plain."""
        return self in (Format.Q4M, Format.Q8)

    @property
    def group_nbytes(self) -> int:
        """Bytes of one row's group of 32 weights, scales included."""
        return {
            Format.Q4M: 16 + 2 + 2,
            Format.Q8: 32 + 2,
            Format.F16: 2 * GROUP,
            Format.BF16: 2 * GROUP,
            Format.F32: 4 * GROUP,
        }[self]

    @property
    def element_nbytes(self) -> int:
        """Bytes of one weight of a plain format."""
        assert not self.quantized
        return self.group_nbytes // GROUP


@dataclass(frozen=True, slots=True)
class Held:
    """How a stored type is held: in which format, and whether that loses nothing."""

    format: Format
    lossless: bool


#: The GGUF type whose rows are the format's own: what packing reads.
NATIVE_TYPES = {
    Format.Q4M: "Q4_1",
    Format.Q8: "Q8_0",
    Format.F16: "F16",
    Format.BF16: "BF16",
    Format.F32: "F32",
}
#: Types that a format holds as they are, or after an exact change of layout.
_LOSSLESS = {
    "Q4_1": Format.Q4M,
    "Q4_0": Format.Q4M,
    "Q8_0": Format.Q8,
    "Q5_0": Format.Q8,
    "IQ4_NL": Format.Q8,
    "MXFP4": Format.Q8,
    "F32": Format.F32,
    "F16": Format.F16,
    "BF16": Format.BF16,
}
#: Types of at most 6 bits a weight: q8 holds them with an error far below their own step.
_REQUANTIZED = (
    *("Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0"),
)
#: How each type of a checkpoint's tensors is held. Safetensors' dtypes have the same names.
STORED_TYPES = {name: Held(format_, True) for name, format_ in _LOSSLESS.items()} | {
    name: Held(Format.Q8, False) for name in _REQUANTIZED
}


def common_format(type_names: Iterable[str]) -> Format:
    """The format of a matrix stacked from tensors of these types: one that holds all of theirs."""
    formats = {STORED_TYPES[name].format for name in type_names}
    if len(formats) == 1:
        return formats.pop()
    return Format.Q8 if all(format_.quantized for format_ in formats) else Format.F32
