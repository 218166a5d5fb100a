"""The NEON units know all that kernels ask of the types of simd.hpp. What they compute, test_isas.py says."""

from __future__ import annotations

import subprocess

import pytest
from builds import SOURCES, require

COMPILER = "aarch64-linux-gnu-g++"


@pytest.mark.parametrize(("unit", "march"), [("neon", "armv8-a"), ("neon_dot", "armv8.2-a+dotprod")])
def test_it_compiles(unit: str, march: str) -> None:
    require(COMPILER)
    command = [COMPILER, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-march={march}"]
    command += ["-DOCTAVO_ARM64", str(SOURCES / f"kernels_{unit}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
