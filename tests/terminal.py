"""A program at a terminal, as a person would use it.

with at_terminal([sys.executable, "-m", "octavo", "chat"]) as terminal:
    terminal.wait_for(b"> ")
    terminal.type(b"hello\n")
"""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """The person's side of it."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._number = number
        self._screen = b""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._number, keys)

    def wait_for(self, text: bytes, seconds: float = 30) -> None:
        """Read on until a text has come; what was before it is forgotten."""
        deadline = time.monotonic() + seconds
        while text not in self._screen:
            assert time.monotonic() < deadline, self._screen
            self._screen += os.read(self._number, 4096)
        self._screen = self._screen[self._screen.index(text) + len(text) :]

    def wait_for_anything(self) -> None:
        """Wait for any output at all."""
        assert os.read(self._number, 4096)


@contextmanager
def at_terminal(command: Sequence[str]) -> Iterator[Terminal]:
    """Start a program at a terminal of its own; it is killed if it is still there at the end."""
    number, end = pty.openpty()
    process = subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(end)
    try:
        yield Terminal(number, process)
    finally:
        process.kill()
        process.wait()
        os.close(number)
