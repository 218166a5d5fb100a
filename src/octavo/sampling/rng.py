"""Randomness without state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").

The word for a token is a function of (seed, position, token id) and nothing else, so a token sampled
again, after a preemption, a crash or on another device, is the same token. Rule: no generator object.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.sampling.arithmetic import log

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

UInt64Array = npt.NDArray[np.uint64]


def philox(counter: tuple[UInt64Array, ...], key: tuple[int, int]) -> tuple[UInt64Array, ...]:
    """Four 32-bit words (in uint64) for each counter of four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_words(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> UInt64Array:
    """A 32-bit word for each token: word token % 4 of the counter (token // 4, position)."""
    quads, where = np.unique(token_ids // 4, return_inverse=True)
    zero = np.zeros_like(quads, dtype=np.uint64)
    words = philox(
        (quads.astype(np.uint64), zero + np.uint64(position), zero, zero), (seed & 0xFFFFFFFF, seed >> 32)
    )
    return np.stack(words)[token_ids % 4, where]


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for each token. The largest of logit + noise is a sample of the softmax."""
    uniform = (random_words(seed, position, token_ids).astype(np.float64) + 0.5) * 2.0**-32
    return -log(-log(uniform))
