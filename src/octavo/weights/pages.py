"""Letting go of the pages of a mapped file.

Rule: the file stays mapped and readable; what is let go of is read again from the page cache.
"""

from __future__ import annotations

import mmap


def release(mapped: mmap.mmap, offset: int, nbytes: int) -> None:
    """Unmap the whole pages within nbytes from an offset on."""
    begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
