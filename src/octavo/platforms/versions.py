"""The versions of what Octavo stands on: wanted, installed, tested.

Rule: a version is called tested only where the whole test suite passed with it. `TESTED` is raised by
whoever ran that.
"""

from __future__ import annotations

import enum
import platform
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

#: Package -> versions, as major.minor, that the test suite passed with.
TESTED = {
    "python": ("3.11",),
    "torch": ("2.13",),
    "numpy": ("2.4",),
    "tokenizers": ("0.22", "0.23"),
    "gguf": ("0.19",),
    "jinja2": ("3.1",),
    "msgspec": ("0.23",),
    "fastapi": ("0.165",),
    "uvicorn": ("0.54",),
    "pydantic": ("2.14",),
    "cyclopts": ("5.5",),
    "rich": ("15.0",),
    "httpx": ("0.28",),
    "huggingface-hub": ("2.4",),
}


class Verdict(enum.StrEnum):
    """What to think of an installed version."""

    TESTED = "tested"
    UNTESTED = "not tested"
    CLASH = "clash"


@dataclass(frozen=True, slots=True)
class PackageVersion:
    """A package and what is to be done about its version; advice is empty where nothing is."""

    name: str
    installed: str
    wanted: str
    tested: str
    verdict: Verdict
    advice: str = ""


def check_versions() -> list[PackageVersion]:
    """Python, and each package that Octavo needs at run time; nothing where Octavo runs uninstalled, since
    then nobody says what it needs."""
    try:
        about = metadata.metadata("octavo")
    except metadata.PackageNotFoundError:
        return []
    found = [_verdict("python", platform.python_version(), about["Requires-Python"])]
    for text in metadata.requires("octavo") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(_verdict(requirement.name, _installed(requirement.name), str(requirement.specifier)))
    return found


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _verdict(name: str, installed: str, wanted: str) -> PackageVersion:
    tested = TESTED.get(name.lower(), ())
    row = name, installed or "missing", wanted, ", ".join(tested)
    if not installed or not Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True):
        what = f"install Python {wanted}" if name == "python" else f"pip install '{name}{wanted}'"
        return PackageVersion(*row, Verdict.CLASH, what)
    version = Version(installed)
    if f"{version.major}.{version.minor}" in tested:
        return PackageVersion(*row, Verdict.TESTED)
    return PackageVersion(*row, Verdict.UNTESTED, "if something is wrong, try a tested version first")
