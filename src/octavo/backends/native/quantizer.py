"""Quantising weights on the library's threads.

Rule: the bits are those of `octavo.quantization.quantize`, which says what is computed. No torch here:
`octavo convert` has no use for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from octavo.backends.native import library
from octavo.backends.native.library import FormatCode, Isa
from octavo.quantization.formats import GROUP, Format
from octavo.quantization.quantize import Bytes, Floats, Quantize, quantize


def quantize_with(loaded: ctypes.CDLL, context: int, values: Floats, format_: Format) -> Bytes:
    """See `octavo.quantization.quantize.quantize`."""
    num_rows, width = values.shape
    values = np.ascontiguousarray(values)
    raw = np.empty((num_rows, width // GROUP * format_.group_nbytes), np.uint8)
    job = library.QuantizeJob(
        format=FormatCode[format_.name],
        width=width,
        num_rows=num_rows,
        values=values.ctypes.data,
        raw=raw.ctypes.data,
    )
    loaded.octavo_quantize(context, ctypes.byref(job))
    return raw


@contextmanager
def quantizer(num_threads: int) -> Iterator[Quantize]:
    """The library's `quantize`, on threads of its own; numpy's where there is no library."""
    loaded = library.load() if library.available() else None
    context = loaded.octavo_create(Isa.AUTO, num_threads) if loaded else None
    if loaded is None or not context:
        yield quantize
        return
    try:
        yield lambda values, format_: quantize_with(loaded, context, values, format_)
    finally:
        loaded.octavo_destroy(context)
