"""What several rooms' tests share: the real models, fetched once into the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

import octavo.backends  # noqa: F401  before any test imports torch: it decides how threads wait
from gemma3_file import fetch_gemma3
from octavo.backends.native import library
from octavo.input.tokenizer import Tokenizer
from octavo.weights.gguf import GGUFFile
from octavo.weights.sources import resolve_model

# Other work shares these cores; how long an example took says nothing about the code.
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-build", type=Path, help="test the native library of this build folder")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("native_build")
    if folder is not None:
        library._package_folders = lambda: [folder.absolute()]


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as the catalog serves it."""
    cache_dir = os.environ.get("OCTAVO_CACHE_DIR") or Path.home() / ".cache" / "octavo"
    return resolve_model("smollm2-135m-instruct", Path(cache_dir), progress=False)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, quantised as Q4_K_M."""
    return fetch_gemma3()


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_path: Path) -> GGUFFile:
    """The file of `smollm2_path`, open."""
    return GGUFFile.open(smollm2_path)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: GGUFFile) -> Tokenizer:
    """SmolLM2's tokenizer."""
    return Tokenizer.from_gguf(smollm2_gguf.metadata)
