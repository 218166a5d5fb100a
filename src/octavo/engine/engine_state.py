"""What a supervisor tells other processes of its engine, in a file.

Rule: one writer; a reader sees a whole state, since files are replaced, never changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from octavo.engine.model_info import ModelInfo


class EngineState(msgspec.Struct, frozen=True):
    """life: counts the engines that became ready. address, pulse: of the one that serves now, if one does.
    trouble: why none does. info: of the first."""

    life: int
    address: str | None
    pulse: str | None
    trouble: str | None
    info: ModelInfo | None

    def write(self, path: Path) -> None:
        """Replace the file."""
        new = path.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(msgspec.json.encode(self))
        os.replace(new, path)

    @classmethod
    def read(cls, path: Path) -> EngineState:
        """The state now. OSError if the supervisor has left."""
        return msgspec.json.decode(path.read_bytes(), type=cls)
