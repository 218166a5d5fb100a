"""What every way of fetching a model shares: what it brings, a lock, a progress bar, room on the disk.

Rule: one process fetches into a folder at a time; the others wait for it and find what it brought.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import DownloadError

logger = logging.getLogger(__name__)

_SPARE_BYTES = 64 << 20  # left free for whatever else writes to the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A model on this machine.

    path: the GGUF file or the directory. nbytes: of its files. licence and revision: "" where unknown.
    """

    path: Path
    nbytes: int
    licence: str = ""
    revision: str = ""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file. The kernel drops the lock of a process that dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is fetching into %s; waiting for it", path.parent)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def progress_bar(description: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told the bytes done so far, of `total`. The bar is on standard error."""
    if not enabled:
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(description), total=total)
        yield lambda num_bytes: bar.update(task, completed=min(num_bytes, total))


def check_room(folder: Path, nbytes: int, what: str) -> None:
    """Raise DownloadError if the disk of `folder` lacks the room."""
    if lack := lack_of_room(folder, nbytes):
        raise DownloadError(f"{what} {lack}; free some space or choose another cache directory")


def lack_of_room(folder: Path, nbytes: int) -> str:
    """What is lacking on the disk of `folder`, or of the nearest parent there is; "" if nothing is."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if not nbytes or free >= nbytes + _SPARE_BYTES:
        return ""
    return f"needs {nbytes / 1e9:.2f} GB more under {folder}, but {free / 1e9:.2f} GB are free there"


def sha256_of(path: Path) -> str:
    """The file's SHA-256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
