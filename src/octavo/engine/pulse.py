"""A page that an engine process writes and its supervisor reads: is it alive, and does it get on?

    u64 beat          when the process last ran, written by a thread of its own
    u64 step_began    when the step under way began; 0 between steps
    u64 num_steps     steps done

Times are nanoseconds of CLOCK_MONOTONIC, which processes share. Rule: one writer; a reader sees each number
whole, and no two need to belong together.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from pathlib import Path

_LAYOUT = struct.Struct("=Q")
_BEAT, _STEP_BEGAN, _NUM_STEPS = 0, 8, 16
_NBYTES = 24
BEAT_SECONDS = 0.2
#: Its name in an engine's directory.
PULSE_FILE = "pulse"


class Pulse:
    """The page, mapped. `create` makes it, `Pulse(path)` opens it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _NBYTES)

    @classmethod
    def create(cls, path: Path) -> Pulse:
        """A page of zeros: it never beat."""
        path.touch(mode=0o600)
        path.write_bytes(bytes(_NBYTES))
        return cls(path)

    # -- the engine's side --------------------------------------------------------------------

    def start_beating(self) -> None:
        """Beat from now on, for as long as the process runs, also within a long step."""
        self._beat()
        threading.Thread(target=self._keep_beating, name="octavo-pulse", daemon=True).start()

    def begin_step(self) -> None:
        """A step is under way."""
        self._write(_STEP_BEGAN, time.monotonic_ns())

    def end_step(self) -> None:
        """The step is done."""
        self._write(_STEP_BEGAN, 0)
        self._write(_NUM_STEPS, self.num_steps + 1)

    def _keep_beating(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._beat()

    def _beat(self) -> None:
        self._write(_BEAT, time.monotonic_ns())

    def _write(self, offset: int, value: int) -> None:
        _LAYOUT.pack_into(self._page, offset, value)

    # -- the supervisor's side ----------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return self._read(_NUM_STEPS)

    @property
    def age(self) -> float:
        """Seconds since the process last ran."""
        return self._since(self._read(_BEAT))

    @property
    def step_seconds(self) -> float:
        """How long the step under way has been; 0 between steps."""
        began = self._read(_STEP_BEGAN)
        return self._since(began) if began else 0.0

    def _read(self, offset: int) -> int:
        value: int = _LAYOUT.unpack_from(self._page, offset)[0]
        return value

    @staticmethod
    def _since(ns: int) -> float:
        return max(0.0, (time.monotonic_ns() - ns) / 1e9)
