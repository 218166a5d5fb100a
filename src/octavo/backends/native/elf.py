"""Whether a file is a whole shared library for this machine, told from its headers.

dlopen does not say: to it a library of another architecture is "not found", and one that was cut short ends
the process with SIGBUS. Reference: the System V ABI, chapters 4 (ELF header) and 5 (program header).
"""

from __future__ import annotations

import struct
from pathlib import Path

#: The value of e_machine, by what `uname -m` calls it: machines of 64 bits, little-endian.
MACHINES = {"x86_64": 62, "aarch64": 183, "ppc64le": 21, "riscv64": 243, "loongarch64": 258}
_HEADER = struct.Struct("<4s12x2H4x8xQQ4x6H")
_SEGMENT = struct.Struct("<2I6Q")
_CLASS_AND_DATA = bytes([2, 1])  # 64 bit, little-endian
_SHARED_OBJECT = 3
_LOADED = 1


def why_not_loadable(path: Path, architecture: str) -> str | None:
    """What is wrong with a library, as the end of a sentence that begins with its path; None if nothing is
    known to be. architecture: of this machine, as `uname -m` says."""
    if architecture not in MACHINES:
        return None
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if not head.startswith(b"\x7fELF"):
            return "is not a shared library"
        if len(head) < _HEADER.size:
            return f"is cut short: it has {nbytes} bytes, fewer than its header"
        _, kind, machine, segments_at, sections_at, _, segment_size, segments, section_size, sections, _ = (
            _HEADER.unpack(head)
        )
        if machine != MACHINES[architecture]:
            names = {number: name for name, number in MACHINES.items()}
            found = names.get(machine, f"machine {machine}")
            return f"is of another architecture: it is for {found}, but this machine is {architecture}"
        if head[4:6] != _CLASS_AND_DATA or kind != _SHARED_OBJECT or segment_size != _SEGMENT.size:
            return "is not a shared library that this machine loads"
        ends = [sections_at + sections * section_size, segments_at + segments * segment_size]
        file.seek(segments_at)
        table = file.read(segments * segment_size)
    for segment in range(len(table) // segment_size):
        kind, _, begin, _, _, length, _, _ = _SEGMENT.unpack_from(table, segment * segment_size)
        if kind == _LOADED:
            ends.append(begin + length)
    if nbytes < max(ends):
        return f"is cut short: it has {nbytes} bytes of {max(ends)}"
    return None
