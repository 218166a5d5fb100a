"""`octavo pull` as a process: Hugging Face's library reads its variables when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hub_server import NEEDED, HubServer, repository

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `octavo pull` with caches of this test's own."""

    def pull(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        drop = ("HF_", "MODELSCOPE_", "OCTAVO_", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
        own = {"HF_HOME": str(tmp_path / "hf"), "OCTAVO_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, "-m", "octavo", "pull", *arguments],
            env=environ | own | variables, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return pull


def test_the_path_alone_is_on_standard_output(run: Run, tmp_path: Path) -> None:
    files = repository(os.urandom)
    with HubServer() as hub:
        hub.add("o/n", files, licence="mit")
        for name, variable in (("o/n", "HF_ENDPOINT"), ("modelscope:o/n", "MODELSCOPE_ENDPOINT")):
            done = run(name, **{variable: hub.url})
            assert done.returncode == 0, done.stderr
            folder = Path(done.stdout.removesuffix("\n"))
            assert folder.is_absolute()
            assert folder.is_relative_to(tmp_path)
            assert all((folder / name).read_bytes() == files[name] for name in NEEDED)
            assert "0.5 MB" in done.stderr
            assert ("mit" in done.stderr) == (name == "o/n")
            hub.requests.clear()
            for offline in ({"OCTAVO_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1"}):
                again = run(name, **{variable: hub.url}, **offline)
                assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr
            assert hub.requests == []


def test_errors_are_one_sentence(run: Run) -> None:
    with HubServer() as hub:
        done = run("o/n", HF_ENDPOINT=hub.url)
        assert (done.returncode, done.stdout) == (1, "")
        assert "error: there is no file or directory 'o/n', and no such model on the hub" in done.stderr
        assert done.stderr.count("\n") == 1
        done = run("o/n", "--offline", HF_ENDPOINT=hub.url)
        assert "run `octavo pull o/n` once with a network" in done.stderr


def test_without_a_model_the_catalog_is_listed(run: Run, tmp_path: Path) -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    (head, row) = done.stdout.splitlines()
    assert head.split() == ["model", "size", "licence", "cached", "description"]
    assert row.split()[:5] == ["smollm2-135m-instruct", "98.4", "MB", "Apache-2.0", "no"]
    cached = tmp_path / "cache" / "smollm2-135m-instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    cached.parent.mkdir(parents=True)
    with cached.open("wb") as file:
        file.truncate(98_362_432)
    assert run().stdout.splitlines()[1].split()[4] == "yes"
