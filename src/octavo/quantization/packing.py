"""From GGUF's blocks to integers and scales.

Source: the GGML block layouts. A block is a row's group of 32 weights:

    Q4_1   f16 d | f16 m | 16 bytes: weight i in the low nibble of byte i, weight i + 16 in the high
    Q8_0   f16 d | 32 int8

Rule: unpacking is exact; scales stay the f16 values they were, widened to f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError
from octavo.quantization.formats import GROUP

_Q4_1_NBYTES = 20
_Q8_0_NBYTES = 34


@dataclass(frozen=True, slots=True)
class Groups:
    """Quantised rows: q int8 [N, K], d f32 [N, K / 32], m likewise or None."""

    q: npt.NDArray[np.int8]
    d: npt.NDArray[np.float32]
    m: npt.NDArray[np.float32] | None

    def values(self) -> npt.NDArray[np.float32]:
        """w = d q (+ m), f32 [N, K]. d q is exact, so only the sum is rounded."""
        w = self.q.reshape(*self.d.shape, GROUP).astype(np.float32)
        with np.errstate(all="ignore"):  # a damaged file's scales may be inf or NaN; the result shows it
            w *= self.d[:, :, None]
            if self.m is not None:
                w += self.m[:, :, None]
        return w.reshape(self.q.shape)


def unpack_groups(type_name: str, raw: npt.NDArray[np.uint8]) -> Groups:
    """Integers and scales of rows in GGUF's layout, raw uint8 [N, nbytes of a row]."""
    if type_name == "Q4_1":
        return _unpack_q4_1(raw)
    if type_name == "Q8_0":
        return _unpack_q8_0(raw)
    raise UnsupportedModelError(f"weights of type {type_name} have no quantised arithmetic here")


def _unpack_q4_1(raw: npt.NDArray[np.uint8]) -> Groups:
    rows = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(rows, -1, _Q4_1_NBYTES)
    scales = blocks[:, :, :4].copy().view(np.float16).astype(np.float32)
    nibbles = blocks[:, :, 4:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.int8)
    return Groups(q.reshape(rows, -1), scales[:, :, 0].copy(), scales[:, :, 1].copy())


def _unpack_q8_0(raw: npt.NDArray[np.uint8]) -> Groups:
    rows = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(rows, -1, _Q8_0_NBYTES)
    d = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)[:, :, 0]
    q = blocks[:, :, 2:].copy().view(np.int8)
    assert q.shape[2] == GROUP
    return Groups(q.reshape(rows, -1), d, None)
