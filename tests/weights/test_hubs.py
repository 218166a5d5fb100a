"""Models from hubs: real clients against a server that speaks both hubs' protocols."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest

from hub_server import NEEDED, HubServer, repository
from octavo.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.weights import huggingface, modelscope
from octavo.weights.sources import fetch_model, resolve_model

REPO = "octavo-tests/tiny"
HUBS = ["hf", "modelscope"]


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both clients take `url` for their hub."""
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    # What HF_ENDPOINT sets, as it was when the library was imported.
    template = huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE
    path = template.removeprefix(huggingface_hub.constants.ENDPOINT)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A server in place of both hubs, and caches of this test's own."""
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts
    with HubServer() as server:
        point_at(server.url, monkeypatch)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield server


@pytest.fixture
def get(tmp_path: Path) -> Callable[..., Path]:
    """Resolve a model with this test's caches."""

    def resolve(name: str, *, offline: bool = False) -> Path:
        return resolve_model(name, tmp_path / "cache", progress=False, offline=offline)

    return resolve


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    return {name: data for name, data in names.items() if name not in (".lock", ".octavo.json")}


@pytest.mark.parametrize("kind", HUBS)
class TestBothHubs:
    """What holds whichever hub a model comes from."""

    def test_brings_what_is_needed_and_nothing_else(
        self, kind: str, hub: HubServer, get: Callable[..., Path]
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        path = get(f"{kind}:{REPO}")
        assert files_of(path) == {name: files[name] for name in NEEDED}
        assert sorted(hub.fetched()) == sorted(NEEDED)

        hub.requests.clear()  # a second call looks for changes, and fetches nothing
        assert get(f"{kind}:{REPO}") == path
        assert hub.requests
        assert hub.fetched() == []

    def test_a_new_commit_brings_what_changed(
        self, kind: str, hub: HubServer, get: Callable[..., Path]
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        get(f"{kind}:{REPO}")
        hub.requests.clear()
        single = {"model.safetensors": os.urandom(1000), "config.json": b'{"model_type": "other"}'}
        kept = {name: data for name, data in files.items() if not name.startswith("model-")}
        del kept["model.safetensors.index.json"]
        hub.add(REPO, kept | single)
        path = get(f"{kind}:{REPO}")
        assert (path / "config.json").read_bytes() == single["config.json"]
        assert (path / "model.safetensors").read_bytes() == single["model.safetensors"]
        assert not list(path.glob("model-*"))  # a reader would be offered both
        assert sorted(hub.fetched()) == sorted(single)

    def test_goes_on_after_a_cut_connection(
        self, kind: str, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        shard = "model-00001-of-00002.safetensors"
        hub.cut[shard] = 100_000
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it writes at once
        path = get(f"{kind}:{REPO}")
        assert (path / shard).read_bytes() == files[shard]
        ranges = [header for _, url, header in hub.requests if shard in url and header is not None]
        assert ranges == ["bytes=100000-"]

    def test_starts_anew_where_the_server_knows_no_ranges(
        self, kind: str, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        hub.ignores_ranges = True
        hub.cut["model-00001-of-00002.safetensors"] = 100_000
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        assert files_of(get(f"{kind}:{REPO}")) == {name: files[name] for name in NEEDED}

    @pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
    def test_what_arrives_damaged_is_deleted(
        self, kind: str, hub: HubServer, get: Callable[..., Path], name: str
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        hub.corrupt.add(name)
        with pytest.raises(
            DownloadError,
            match=rf"{REPO} is not what the hub names: {name}|{name} of .*{REPO} is not the file",
        ):
            get(f"{kind}:{REPO}")
        with pytest.raises(DownloadError, match="offline mode is on"):
            get(f"{kind}:{REPO}", offline=True)
        hub.corrupt.clear()
        assert files_of(get(f"{kind}:{REPO}")) == {name: files[name] for name in NEEDED}

    def test_offline_takes_what_is_there_and_asks_nobody(
        self, kind: str, hub: HubServer, get: Callable[..., Path]
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        name = f"{kind}:{REPO}"
        said = name.removeprefix("hf:")
        with pytest.raises(DownloadError, match=f"offline mode is on; run `octavo pull {said}` once"):
            get(name, offline=True)
        assert hub.requests == []
        path = get(name)
        hub.requests.clear()
        assert get(name, offline=True) == path
        (path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(DownloadError, match="is not complete in"):
            get(name, offline=True)
        assert hub.requests == []

    def test_without_a_network_what_is_cached_is_used(
        self,
        kind: str,
        hub: HubServer,
        get: Callable[..., Path],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        path = get(f"{kind}:{REPO}")
        with socket.create_server(("127.0.0.1", 0)) as free:
            nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
        point_at(nowhere, monkeypatch)
        with caplog.at_level(logging.WARNING):
            assert get(f"{kind}:{REPO}") == path
        assert "using what is cached" in caplog.text
        with pytest.raises(DownloadError, match=rf"could not be fetched from {nowhere}.*Check the network"):
            get(f"{kind}:{REPO}-other")

    def test_what_is_not_there(self, kind: str, hub: HubServer, get: Callable[..., Path]) -> None:
        with pytest.raises(ModelNotFoundError, match=rf"no such model|there is no model '{REPO}'"):
            get(f"{kind}:{REPO}")
        hub.add(REPO, repository(os.urandom))
        with pytest.raises(ModelNotFoundError, match="revision 'v7'"):
            get(f"{kind}:{REPO}@v7")

    @pytest.mark.parametrize("status", [401, 403])
    def test_gated(self, kind: str, hub: HubServer, get: Callable[..., Path], status: int) -> None:
        hub.add(REPO, repository(os.urandom))
        hub.refuse[REPO] = (status, {"X-Error-Code": "GatedRepo"})
        token = {"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[kind]
        with pytest.raises(DownloadError, match=rf"accept its (licence|terms) at {hub.url}/.*{token}"):
            get(f"{kind}:{REPO}")

    @pytest.mark.parametrize("status", [401, 403])
    def test_gated_files_of_a_repository_that_can_be_listed(
        self, kind: str, hub: HubServer, get: Callable[..., Path], status: int
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        hub.refuse_files[REPO] = (status, {"X-Error-Code": "GatedRepo"})
        with pytest.raises(DownloadError, match=rf"accept its (licence|terms) at {hub.url}/"):
            get(f"{kind}:{REPO}")

    def test_a_hub_in_trouble(self, kind: str, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, repository(os.urandom))
        hub.refuse[REPO] = (500, {})
        with pytest.raises(DownloadError, match=r"answered 500 for octavo-tests/tiny"):
            get(f"{kind}:{REPO}")

    def test_a_token_is_sent(
        self, kind: str, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        monkeypatch.setenv({"hf": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}[kind], "hf_secret")
        get(f"{kind}:{REPO}")
        assert set(hub.authorisations) == {"Bearer hf_secret"}

    def test_names_that_lead_out_of_the_directory_are_left_alone(
        self, kind: str, hub: HubServer, get: Callable[..., Path], tmp_path: Path
    ) -> None:
        files = repository(os.urandom)
        hostile = [
            "../evil.safetensors",
            "/evil.gguf",
            "a/../../evil.gguf",
            "..",
            "additional_chat_templates/../x.jinja",
        ]
        hub.add(REPO, files | dict.fromkeys(hostile, b"evil"))
        if kind == "hf":  # its library refuses what it is not even asked for
            hub.repos[REPO].pop("..")
        path = get(f"{kind}:{REPO}")
        assert files_of(path) == {name: files[name] for name in NEEDED}
        assert not [
            found for found in tmp_path.rglob("*") if found.is_file() and found.read_bytes() == b"evil"
        ]

    def test_a_full_disk_is_seen_before_anything_is_fetched(
        self, kind: str, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000, total=1, used=0))
        with pytest.raises(DownloadError, match=r"needs 0\.00 GB more under .* free some space"):
            get(f"{kind}:{REPO}")
        assert hub.fetched() == []

    def test_a_disk_that_fills_meanwhile(
        self, kind: str, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, repository(os.urandom))

        def full(*arguments: Any, **named: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(modelscope, "_download", full)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
        with pytest.raises(DownloadError, match=r"could not be stored under .*No space left"):
            get(f"{kind}:{REPO}")

    def test_pickles_are_not_fetched(self, kind: str, hub: HubServer, get: Callable[..., Path]) -> None:
        files = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}
        hub.add(REPO, files)
        with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin only.*octavo convert"):
            get(f"{kind}:{REPO}")
        assert hub.fetched() == []


class TestGGUF:
    """Repositories of GGUF files."""

    FILES = (
        "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny.Q8_0.gguf", "sub/tiny-F16.gguf", "mmproj-F16.gguf",
        "big-Q6_K-00001-of-00002.gguf", "big-Q6_K-00002-of-00002.gguf", "README.md", "config.json",
    )  # fmt: skip

    @pytest.fixture
    def files(self, hub: HubServer) -> dict[str, bytes]:
        files = {name: os.urandom(1000) for name in self.FILES}
        hub.add(REPO, files)
        return files

    @pytest.mark.parametrize(
        ("wanted", "name"),
        [
            ("Q4_K_M", "tiny-Q4_K_M.gguf"),
            ("q4_k_s", "tiny-Q4_K_S.gguf"),
            ("Q8_0", "tiny.Q8_0.gguf"),
            ("F16", "sub/tiny-F16.gguf"),
            ("tiny-F16.gguf", "sub/tiny-F16.gguf"),
        ],
    )
    @pytest.mark.parametrize("kind", HUBS)
    def test_one_is_chosen(
        self,
        kind: str,
        wanted: str,
        name: str,
        hub: HubServer,
        files: dict[str, bytes],
        get: Callable[..., Path],
    ) -> None:
        path = get(f"{kind}:{REPO}:{wanted}")
        assert path.read_bytes() == files[name]
        assert path.suffix == ".gguf"
        assert hub.fetched() == [name]
        assert get(f"{kind}:{REPO}:{wanted}", offline=True) == path
        with pytest.raises(DownloadError, match="offline"):
            get(f"{kind}:{REPO}:Q2_K", offline=True)

    @pytest.mark.parametrize("wanted", ["", ":Q4_K", ":Q2_K", ":4"])
    def test_an_open_choice_lists_what_is_there(
        self, wanted: str, files: dict[str, bytes], get: Callable[..., Path]
    ) -> None:
        with pytest.raises(UnsupportedModelError) as raised:
            get(f"{REPO}{wanted}")
        assert "tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf, tiny.Q8_0.gguf" in str(raised.value)
        assert f"`{REPO}:F16`" in str(raised.value)
        assert "mmproj" not in str(raised.value)

    def test_a_split_one_says_how_to_merge(self, files: dict[str, bytes], get: Callable[..., Path]) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"llama-gguf-split --merge big-Q6_K-00001-of-00002\.gguf"
        ):
            get(f"{REPO}:Q6_K")

    def test_the_only_one_needs_no_choice(self, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, {"only-Q4_0.gguf": b"GGUF", "README.md": b""})
        assert get(REPO).read_bytes() == b"GGUF"

    def test_a_colon_where_there_are_none(self, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, repository(os.urandom))
        with pytest.raises(UnsupportedModelError, match=r"has no \.gguf files"):
            get(f"{REPO}:Q4_0")

    def test_a_repository_of_something_else(self, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, {"README.md": b"", "a.onnx": b""})
        with pytest.raises(UnsupportedModelError, match=r"holds neither .* but README\.md, a\.onnx"):
            get(REPO)


class TestHuggingFace:
    """What only its client does."""

    def test_the_licence_and_the_commit_are_known(self, hub: HubServer, tmp_path: Path) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files, licence="apache-2.0")
        fetched = fetch_model(REPO, tmp_path, progress=False)
        assert (fetched.licence, fetched.revision) == ("apache-2.0", hub.commit(REPO))
        assert fetched.nbytes == sum(len(files[name]) for name in NEEDED)

    def test_a_commit_can_be_named(self, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, repository(os.urandom))
        path = get(f"{REPO}@{hub.commit(REPO)}")
        assert path.name == hub.commit(REPO)
        assert get(f"{REPO}@{hub.commit(REPO)}", offline=True) == path

    def test_the_bar_is_ours_alone(
        self,
        hub: HubServer,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(huggingface, "_POLL_SECONDS", 0.001)
        hub.add(REPO, repository(os.urandom))
        disabled = huggingface.are_progress_bars_disabled()  # other tests may have
        resolve_model(REPO, tmp_path, progress=True)
        printed = capfd.readouterr()
        assert printed.out == ""
        assert f"Fetching {REPO}" in printed.err
        assert "Reconstructing" not in printed.err
        assert huggingface.are_progress_bars_disabled() == disabled


class TestModelScope:
    """What only our client of it does."""

    def test_a_killed_download_is_gone_on_with(
        self, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = repository(os.urandom)
        hub.add(REPO, files)
        shard = "model-00002-of-00002.safetensors"
        hub.cut[shard] = 70_000
        monkeypatch.setattr(modelscope, "_ATTEMPTS", 1)
        with pytest.raises(DownloadError, match="could not be fetched from"):
            get(f"modelscope:{REPO}")
        hub.requests.clear()
        path = get(f"modelscope:{REPO}")
        assert (path / shard).read_bytes() == files[shard]
        assert [header for _, url, header in hub.requests if shard in url] == ["bytes=70000-"]
        assert not list(path.glob("*.part"))

    def test_a_file_that_changed_is_not_appended_to(
        self, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        hub.cut["model-00001-of-00002.safetensors"] = 70_000
        monkeypatch.setattr(modelscope, "_ATTEMPTS", 1)
        with pytest.raises(DownloadError, match="could not be fetched from"):
            get(f"modelscope:{REPO}")
        files = repository(os.urandom)
        hub.add(REPO, files)
        assert files_of(get(f"modelscope:{REPO}")).items() >= {name: files[name] for name in NEEDED}.items()

    def test_several_at_once_fetch_once(self, hub: HubServer, get: Callable[..., Path]) -> None:
        hub.add(REPO, repository(os.urandom))
        with ThreadPoolExecutor(3) as pool:
            paths = set(pool.map(get, [f"modelscope:{REPO}"] * 3))
        assert len(paths) == 1
        assert sorted(hub.fetched()) == sorted(NEEDED)

    def test_a_longer_file_than_listed_is_not_written_to_the_end(
        self, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        real = modelscope._list

        def shorter(*arguments: Any) -> dict[str, modelscope.RemoteFile]:
            listing = real(*arguments)
            return listing | {"tokenizer.json": modelscope.RemoteFile(10, "0" * 64)}

        monkeypatch.setattr(modelscope, "_list", shorter)
        with pytest.raises(DownloadError, match=r"tokenizer\.json .* it has 11 bytes .* expected 10"):
            get(f"modelscope:{REPO}")

    @pytest.mark.parametrize(
        "answer",
        [b"<html>", b"[]", b'{"Data": null}', b'{"Data": {"Files": [{"Path": "config.json", "Size": -1}]}}'],
    )
    def test_an_answer_that_is_no_listing(
        self, hub: HubServer, get: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, answer: bytes
    ) -> None:
        hub.add(REPO, repository(os.urandom))
        real = modelscope.httpx.Client.get

        def get_other(*arguments: Any, **named: Any) -> Any:
            response = real(*arguments, **named)
            response._content = answer
            return response

        monkeypatch.setattr(modelscope.httpx.Client, "get", get_other)
        with pytest.raises(DownloadError, match="did not answer with a list"):
            get(f"modelscope:{REPO}")
