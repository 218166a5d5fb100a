"""How weights lie in memory, and what that costs.

Rule: a format is named after what a group of weights shares. Groups run along K, the reduction
dimension, and hold 32 weights.

    q4     w = d * (q - 8)        q: 4 bit, d: f16      4.5 bit a weight   (GGUF Q4_0)
    q4m    w = d * q + m          q: 4 bit, d, m: f16   5   bit            (GGUF Q4_1)
    q8     w = d * q              q: int8,  d: f16      8.5 bit            (GGUF Q8_0)
    q8g16  w = d[k / 16] * q      likewise, but d of    9   bit
                                  each half of a group
    f16    w                                            16  bit
    bf16   w                                            16  bit
    f32    w                                            32  bit

A type that no format holds exactly goes to the one that is nearest to it; `conversion` says how. Arithmetic
is in f32 whatever the plain format: weights are widened, exactly, as they are read.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

GROUP = 32


class Format(enum.StrEnum):
    """The element format of a weight."""

    Q4 = "q4"
    Q4M = "q4m"
    Q8 = "q8"
    Q8G16 = "q8g16"
    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"

    @property
    def quantized(self) -> bool:
        """Whether weights come in groups that share a scale; the other formats are plain."""
        return self in _QUANTIZED

    @property
    def is_4_bit(self) -> bool:
        """Whether its integers have 4 bits; activations that meet them may be int8."""
        return self in (Format.Q4, Format.Q4M)

    @property
    def group_nbytes(self) -> int:
        """Bytes of one row's group of 32 weights, scales included."""
        return {
            Format.Q4: 16 + 2,
            Format.Q4M: 16 + 2 + 2,
            Format.Q8: 32 + 2,
            Format.Q8G16: 32 + 2 + 2,
            Format.F16: 2 * GROUP,
            Format.BF16: 2 * GROUP,
            Format.F32: 4 * GROUP,
        }[self]

    @property
    def element_nbytes(self) -> int:
        """Bytes of one weight of a plain format."""
        assert not self.quantized
        return self.group_nbytes // GROUP


#: Each holds what those before it hold: exactly what has no mins, else by half a step of its own.
_QUANTIZED = (Format.Q4, Format.Q4M, Format.Q8, Format.Q8G16)


@dataclass(frozen=True, slots=True)
class Held:
    """How a stored type is held: in which format, and whether that loses nothing."""

    format: Format
    lossless: bool


#: The type whose rows are the format's own: what packing reads. GGUF's, but for Q8G16, which no file has: f16
#: d of the first 16 weights, f16 d of the others, 32 int8.
NATIVE_TYPES = {
    Format.Q4: "Q4_0",
    Format.Q4M: "Q4_1",
    Format.Q8: "Q8_0",
    Format.Q8G16: "Q8G16",
    Format.F16: "F16",
    Format.BF16: "BF16",
    Format.F32: "F32",
}
#: Types that a format holds as they are, or after an exact change of layout.
_LOSSLESS = {
    "Q4_0": Format.Q4,
    "TQ1_0": Format.Q4,
    "TQ2_0": Format.Q4,
    "Q4_1": Format.Q4M,
    "Q8_0": Format.Q8,
    "Q5_0": Format.Q8,
    "IQ4_NL": Format.Q8,
    "MXFP4": Format.Q8,
    "F32": Format.F32,
    "F16": Format.F16,
    "BF16": Format.BF16,
}
#: Types of at most 6 bits a weight: these formats, which share scales as they do, hold them with an error
#: far below their own step.
_ROUNDED = {
    Format.Q4M: ("Q4_K",),
    Format.Q8: ("Q5_1", "Q5_K", "IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_XS", "Q1_0"),
    Format.Q8G16: ("Q2_K", "Q3_K", "Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S", "NVFP4"),
}
#: How each type of a checkpoint's tensors is held. Safetensors' dtypes have the same names.
STORED_TYPES = {name: Held(format_, True) for name, format_ in _LOSSLESS.items()} | {
    name: Held(format_, False) for format_, names in _ROUNDED.items() for name in names
}


def common_format(type_names: Iterable[str]) -> Format:
    """The format of a matrix stacked from tensors of these types: one that holds all of theirs."""
    formats = {STORED_TYPES[name].format for name in type_names}
    if len(formats) == 1:
        return formats.pop()
    return max(formats, key=_QUANTIZED.index) if formats <= set(_QUANTIZED) else Format.F32


def holds_exactly(format_: Format, type_name: str) -> bool:
    """Whether a matrix's `common_format` holds one of its types without rounding."""
    held = STORED_TYPES[type_name]
    if format_ is Format.F32 or not held.lossless:
        return format_ is Format.F32
    # Mins are the type's own; scales alone can be repeated, and integers widened.
    return format_ is held.format or (format_.quantized and held.format in (Format.Q4, Format.Q8))
