"""The kernels of every ISA give the bits of the portable ones, here and, under an emulator, on aarch64.

csrc/cpu/tests/compare_isas.cpp runs random programs on two ISAs and prints a digest of what they computed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from builds import build, require

from octavo.backends.native.library import Isa

pytestmark = pytest.mark.slow

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
CASES = 300  # what an emulator runs in a minute


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that compares on this machine."""
    folder = tmp_path_factory.mktemp("here")
    build(folder, "-DOCTAVO_COMPARE=ON")
    return [str(folder / "compare_isas")]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that compares on an emulated aarch64."""
    require(COMPILER, EMULATOR)
    folder = tmp_path_factory.mktemp("aarch64")
    build(
        folder,
        "-DOCTAVO_COMPARE=ON",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={COMPILER}",
    )
    root = subprocess.check_output([COMPILER, "-print-file-name=libc.so.6"], text=True)
    return [EMULATOR, "-L", str(Path(root.strip()).resolve().parents[1]), str(folder / "compare_isas")]


def compare(command: list[str], isa: Isa, cases: int, seed: int = 1) -> str:
    """The digest on which the ISA and the portable kernels agree."""
    arguments = [str(int(number)) for number in (Isa.SCALAR, isa, cases, seed)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    names, digest = done.stdout.split(" agree, digest ")
    assert names == f"scalar and {isa.name.lower()}"
    return digest


@pytest.mark.parametrize("isa", [isa for isa in Isa if isa not in (Isa.AUTO, Isa.SCALAR)])
def test_here(here: list[str], isa: Isa) -> None:
    assert compare(here, isa, 10 * CASES, seed=2) == compare(here, Isa.SCALAR, 10 * CASES, seed=2)


@pytest.mark.parametrize("isa", [Isa.NEON, Isa.NEON_DOT])
def test_on_aarch64_and_its_bits_are_those_of_here(here: list[str], on_arm: list[str], isa: Isa) -> None:
    assert compare(on_arm, isa, CASES) == compare(here, Isa.SCALAR, CASES)
