"""What users install: the sdist, the wheel built from it, and what is left of it without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import httpx
import pytest
import torch

from octavo.backends.native.library import HOW_TO_BUILD, LIBRARY_NAME
from serving import ENDLESS, serve, tiny_path  # noqa: F401  a fixture

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LARGEST_WHEEL = 5_000_000
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.so", "__pycache__", ".*_cache", ".hypothesis", "*.log"
)
MAKE_SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"


def run(*command: str | Path, cwd: Path | None = None, **environ: str) -> str:
    """What a command prints, which must succeed; these variables change its environment."""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | environ, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the sources: builds leave files behind."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "octavo", ignore=NOT_SOURCES))


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, as the build backend makes it."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake not installed")
    folder = tmp_path_factory.mktemp("sdist")
    backend = folder / "backend"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", backend, "scikit-build-core>=1.1,<2")
    run(sys.executable, "-c", MAKE_SDIST, folder, cwd=tree, PYTHONPATH=str(backend))
    (made,) = folder.glob("octavo-*.tar.gz")
    return made


def files_under(folder: Path) -> set[str]:
    """Paths below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_has_all_that_the_build_reads(sdist: Path, tree: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE"} <= names
    for folder in ("csrc", "src"):
        assert {f"{folder}/{name}" for name in files_under(tree / folder)} <= names


def test_the_wheel_is_small_and_whole(sdist: Path, tree: Path, tmp_path: Path) -> None:
    """Everything of the package and one library, which every Python 3 loads."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", "-w", tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    assert wheel.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    library = f"octavo/backends/native/{LIBRARY_NAME}"
    assert names == {f"octavo/{name}" for name in files_under(tree / "src" / "octavo")} | {library}


def test_without_a_compiler_it_serves_and_says_once_what_is_missing(
    sdist: Path,
    tmp_path: Path,
    tiny_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("cmake", "ninja", "make"):
        found = shutil.which(tool)
        if found is not None:
            (tools / tool).symlink_to(found)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    pip = [sys.executable, "-m", "pip", "--python", python]
    nothing = "/nonexistent"
    run(*pip, "install", "--no-deps", "--no-cache-dir", sdist, PATH=str(tools), CC=nothing, CXX=nothing)
    (packages,) = (tmp_path / "venv" / "lib").glob("python3*/site-packages")
    assert not list(packages.rglob(LIBRARY_NAME))
    (packages / "dependencies.pth").write_text(str(Path(torch.__file__).parents[1]))

    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with serve(tiny_path, python=str(python)) as server:
        request = {"prompt": "the", "max_tokens": 3, "logit_bias": ENDLESS}
        for _ in range(2):
            answer = httpx.post(f"{server.url}/v1/completions", json=request).raise_for_status().json()
            assert answer["usage"]["completion_tokens"] == 3
        assert httpx.get(f"{server.url}/version").json()["backend"] == "torch"
        text = server.stderr()
    folder = packages / "octavo" / "backends" / "native"
    said = (
        f"the native CPU kernels can't be used: there is no {LIBRARY_NAME} in {folder}. "
        f"The torch backend serves, slowly. {HOW_TO_BUILD}"
    )
    assert text.count(said) == 1, text
    assert text.count("torch backend") == 1, text
