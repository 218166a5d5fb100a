"""llama-cpp-python in a virtual environment of its own, compiled here for the CPU at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"


def llama_python(folder: Path) -> Path:
    """The Python of an environment that has it; made in `folder` at first, which takes some 10 minutes."""
    python = folder / "bin" / "python"
    if python.exists() and _has_it(python):
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        sys.exit(f"{folder} holds something else than a virtual environment: name an empty --peers-dir")
    print(f"building {PACKAGE} in {folder}: some 10 minutes, once", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    name = PACKAGE.partition("=")[0]
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-binary", name, PACKAGE]
    # pip would take a wheel that it has built before, maybe for another CPU.
    done = subprocess.run(command, env=os.environ | {"CMAKE_ARGS": "-DGGML_NATIVE=ON"})
    if done.returncode:
        sys.exit(f"{PACKAGE} could not be built: see above. It needs a C++ compiler and the package index")
    return python


def _has_it(python: Path) -> bool:
    return not subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode
