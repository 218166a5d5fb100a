"""From GGUF's blocks to integers and scales, and back to nibbles.

Source: the GGML block layouts. A block is a row's group of 32 weights:

    Q4_0    f16 d | 16 bytes: weight i in the low nibble of byte i, weight i + 16 in the high
    Q4_1    f16 d | f16 m | likewise
    Q8_0    f16 d | 32 int8
    Q8G16   f16 d, of the first 16 | f16 d | 32 int8       (ours)

Rule: unpacking is exact; scales stay the f16 values they were, widened to f32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import UnsupportedModelError

#: Bytes of a block, and those of its scales and mins.
_BLOCKS = {"Q4_0": (18, 2), "Q4_1": (20, 4), "Q8_0": (34, 2), "Q8G16": (36, 4)}


@dataclass(frozen=True, slots=True)
class Groups:
    """Quantised rows: q int8 [N, K], d f32 [N, K / 32] or [N, K / 16], m likewise or None.

    q of Q4_0 is what d multiplies: -8 .. 7.
    """

    q: npt.NDArray[np.int8]
    d: npt.NDArray[np.float32]
    m: npt.NDArray[np.float32] | None

    def values(self) -> npt.NDArray[np.float32]:
        """w = d q (+ m), f32 [N, K]. d q is exact, so only the sum is rounded."""
        w = self.q.reshape(*self.d.shape, -1).astype(np.float32)
        with np.errstate(all="ignore"):  # a damaged file's scales may be inf or NaN; the result shows it
            w *= self.d[:, :, None]
            if self.m is not None:
                w += self.m[:, :, None]
        return w.reshape(self.q.shape)


def unpack_groups(type_name: str, raw: npt.NDArray[np.uint8]) -> Groups:
    """Integers and scales of rows in GGUF's layout, raw uint8 [N, nbytes of a row]."""
    if type_name not in _BLOCKS:
        raise UnsupportedModelError(f"weights of type {type_name} have no quantised arithmetic here")
    nbytes, head = _BLOCKS[type_name]
    rows = raw.shape[0]
    blocks = np.ascontiguousarray(raw).reshape(rows, -1, nbytes)
    scales = blocks[:, :, :head].copy().view(np.float16).astype(np.float32)
    bytes_ = blocks[:, :, head:]
    if type_name in ("Q8_0", "Q8G16"):
        q = bytes_.copy().view(np.int8)
        return Groups(q.reshape(rows, -1), scales.reshape(rows, -1), None)
    q = np.concatenate([bytes_ & 15, bytes_ >> 4], axis=2).astype(np.int8)
    if type_name == "Q4_0":
        return Groups(q.reshape(rows, -1) - np.int8(8), scales.reshape(rows, -1), None)
    return Groups(q.reshape(rows, -1), scales[:, :, 0].copy(), scales[:, :, 1].copy())


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Integers of 4 bits [.., 32] as the 16 bytes [.., 16] of a block."""
    half = codes.shape[-1] // 2
    packed: npt.NDArray[np.uint8] = np.left_shift(codes[..., half:], 4, dtype=np.uint8)
    packed |= codes[..., :half]
    return packed
