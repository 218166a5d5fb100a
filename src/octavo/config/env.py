"""The process environment: the only module that touches os.environ.

Every setting `name` of the schema can be given as OCTAVO_NAME. Variables of other programs are honoured
where their users count on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PREFIX = "OCTAVO_"


#: Variables of other programs that give a setting, where its own does not.
_ALSO = {"offline": "HF_HUB_OFFLINE"}


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def read(names: list[str], environ: Mapping[str, str] = os.environ) -> dict[str, tuple[str, str]]:
    """The settings that the environment gives: the variable and its text, by the setting's name."""
    given = {
        name: (also, environ[also]) for name, also in _ALSO.items() if name in names and environ.get(also)
    }
    return given | {
        name: (variable(name), environ[variable(name)]) for name in names if variable(name) in environ
    }


def foreign(name: str) -> str | None:
    """A variable of another program; None where it is unset or empty."""
    return os.environ.get(name) or None


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """octavo in the user's cache directory (XDG base directory specification)."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def set_default(variable: str, value: str) -> None:
    """Set a variable for libraries loaded later, unless the user has set it."""
    os.environ.setdefault(variable, value)
