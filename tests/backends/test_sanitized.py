"""The native backend's tests on a build that stops at the first access out of bounds and at undefined
behaviour (AddressSanitizer, UndefinedBehaviorSanitizer).

Rule: torch's and numpy's memory is seen by the sanitizer because it is preloaded; Python's own leaks are
none of our business.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from builds import build, require

from octavo.backends.native import library

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sanitized library."""
    require("cmake", "g++")
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, "-DOCTAVO_SANITIZE=ON", "-DCMAKE_CXX_COMPILER=g++")
    return folder


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the sanitizer's runtime preloaded."""
    preloaded = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")  # the latter, or its exceptions are not found
    ]
    environ = os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "FUZZ_EXAMPLES": "1000",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("tests", sorted(path.name for path in HERE.glob("test_native_*.py")))
def test_the_kernel_tests_pass_on_it(sanitized: Path, tests: str) -> None:
    options = ["-m", "not slow", f"--native-build={sanitized}", "-p", "no:cacheprovider"]
    options += ["--capture=sys", "-p", "no:faulthandler"]  # the sanitizer's report is the better one
    done = run_sanitized("-m", "pytest", *options, str(HERE / tests))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


OVERRUN = """
import ctypes, sys
import numpy as np
from octavo.backends.native import library
lib = ctypes.CDLL(sys.argv[1])
raw = np.zeros((17, 4), np.uint8)
packed = np.zeros(16 * 4, np.uint8)  # a panel of one column: room for 16 rows
job = library.PackJob(format=0, width=1, num_rows=int(sys.argv[2]), raw=raw.ctypes.data,
                      packed=packed.ctypes.data)
lib.octavo_pack(None, ctypes.byref(job))
print("done")
"""


def test_it_stops_at_one_row_too_many(sanitized: Path) -> None:
    """What makes the tests above worth something: memory of numpy's is guarded to the byte."""
    path = str(sanitized / library.LIBRARY_NAME)
    assert run_sanitized("-c", OVERRUN, path, "16").stdout == "done\n"
    overrun = run_sanitized("-c", OVERRUN, path, "17")
    assert overrun.stdout == ""
    assert "AddressSanitizer: heap-buffer-overflow" in overrun.stderr
    assert "pack_plain_row" in overrun.stderr
