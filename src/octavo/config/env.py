"""The process environment: the only module that touches os.environ.

Every setting `name` of the schema can be given as OCTAVO_NAME.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "OCTAVO_"


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def read(names: list[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings that the environment gives, as text."""
    return {name: environ[variable(name)] for name in names if variable(name) in environ}


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """octavo in the user's cache directory (XDG base directory specification)."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def set_default(variable: str, value: str) -> None:
    """Set a variable for libraries loaded later, unless the user has set it."""
    os.environ.setdefault(variable, value)
