"""Builds of csrc/cpu that tests make for themselves: with other options than the installed one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc" / "cpu"


def require(*tools: str) -> None:
    """Skip the test, and say why, where one of these programs is not installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def build(folder: Path, *options: str) -> None:
    """Configure csrc/cpu with these options and build it in `folder`."""
    require("cmake")
    for command in (
        ["cmake", "-S", str(SOURCES), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
