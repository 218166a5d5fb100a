"""exp and log that give the same bits everywhere: the native backend's choice.cpp does as written here.

Rule: only operations that IEEE 754 rounds correctly, in a fixed order, in float64. numpy's own exp and log
differ from processor to processor.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

_LOG2E = 1.44269504088896340736
# ln 2 in two parts, the first with zeros at its end, so that small multiples of it are exact.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LEAST_EXPONENT = -700.0
_EXP_TERMS = [1.0 / math.factorial(k) for k in range(13, -1, -1)]
_LOG_TERMS = [1.0 / k for k in range(21, 2, -2)]
_BITS_OF_HALF_ROOT = np.int64(0x3FE6A09E667F3BCD)  # of sqrt(0.5)


def exp(x: Values) -> Values:
    """exp of x <= 0; of -700 below. x = n ln 2 + r, and Taylor's polynomial in |r| <= ln 2 / 2."""
    clamped = np.maximum(x, _LEAST_EXPONENT)
    n = np.rint(clamped * _LOG2E)
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = p * r + term
    power = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return p * power


def log(x: Values) -> Values:
    """log of normal x > 0. x = 2**e m with m around 1; log(m) = 2 atanh((m - 1) / (m + 1)) as a series."""
    bits = x.view(np.int64)
    e = (bits - _BITS_OF_HALF_ROOT) >> 52
    m = (bits - (e << 52)).view(np.float64)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        p = p * z + term
    head = 2.0 * s
    return e * _LN2_HIGH + (head + (head * z * p + e * _LN2_LOW))
