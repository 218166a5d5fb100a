"""What a model's name means: catalog, path or hub, in that order, and what is never looked for on a hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from octavo.weights import sources
from octavo.weights.fetching import Fetched
from octavo.weights.hub import HubId, choose_files, is_safe, parse_hub_id
from octavo.weights.sources import fetch_model, resolve_model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[HubId]:
    """What a hub was asked for; no hub is."""
    asked: list[HubId] = []

    def fetch_from_hub(hub_id: HubId, cache_dir: Path, **flags: bool) -> Fetched:
        asked.append(hub_id)
        return Fetched(path=cache_dir, nbytes=0)

    monkeypatch.setattr(sources, "_fetch_from_hub", fetch_from_hub)
    return asked


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("hf", "org/name")),
        ("hf:org/name", HubId("hf", "org/name")),
        ("modelscope:org/name", HubId("modelscope", "org/name")),
        ("Org-1/a.b_c-2", HubId("hf", "Org-1/a.b_c-2")),
        ("org/name@v1.0", HubId("hf", "org/name", "v1.0")),
        ("org/name@refs/pr/3", HubId("hf", "org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", HubId("hf", "org/name", None, "Q4_K_M")),
        ("org/name:sub/file-Q8_0.gguf", HubId("hf", "org/name", None, "sub/file-Q8_0.gguf")),
        ("modelscope:org/name@dev:Q8_0", HubId("modelscope", "org/name", "dev", "Q8_0")),
    ],
)
def test_ids(name: str, expected: HubId, asked: list[HubId], tmp_path: Path) -> None:
    resolve_model(name, tmp_path, progress=False)
    assert asked == [expected]
    assert parse_hub_id(str(expected)) == expected


@pytest.mark.parametrize(
    "name",
    [
        "", "name", "./org/name", "../name", "/org/name", "~/name", "~nobody/name", "org/name.gguf", "x.GGUF",
        "org/name/more", "org/", "/name", "org//name", "-org/name", ".org/name", "org/..", "../no/such",
        "org/name@", "org/name:", "org/name@../../x", "org/name@a/../b", "s3:org/name", "https://huggingface.co/org/name",
        "org/na me", "org/n\N{LATIN SMALL LETTER E WITH ACUTE}", "org/name\n", "x" * 10_000 + "/y", "a\0/b",
    ],
)  # fmt: skip
def test_what_is_no_id_is_not_found(name: str, asked: list[HubId], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"The catalog has: smollm2-135m-instruct.*called org/name"):
        resolve_model(name, tmp_path, progress=False)
    assert asked == []


def test_what_exists_comes_before_the_hub(
    asked: list[HubId], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    with pytest.raises(UnsupportedModelError, match="the hub's model of that name, write hf:org/name"):
        resolve_model("org/name", tmp_path, progress=False)
    (tmp_path / "org" / "name" / "config.json").write_bytes(b"12345")
    fetched = fetch_model("org/name", tmp_path, progress=False)
    assert (fetched.path, fetched.nbytes) == (Path("org/name"), 5)
    assert asked == []
    resolve_model("hf:org/name", tmp_path, progress=False)
    assert asked == [HubId("hf", "org/name")]


def test_a_part_of_a_split_file_says_how_to_merge(tmp_path: Path) -> None:
    part = tmp_path / "big-00002-of-00003.gguf"
    part.touch()
    first = tmp_path / "big-00001-of-00003.gguf"
    with pytest.raises(
        UnsupportedModelError, match=f"part 2 of .* 3 files.*llama-gguf-split --merge {first}"
    ):
        resolve_model(str(part), tmp_path, progress=False)
    whole = tmp_path / "big-00001-of-00001.gguf"
    whole.touch()
    assert resolve_model(str(whole), tmp_path, progress=False) == whole


def test_the_catalog_fetches_nothing_offline(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="offline mode is on; run `octavo pull smollm2-135m-instruct`"):
        resolve_model("smollm2-135m-instruct", tmp_path, progress=False, offline=True)


@given(st.lists(st.text("./\\~aZ0_-:\0\n é", max_size=12), max_size=8))
def test_no_name_of_a_server_leads_out_of_a_directory(parts: list[str]) -> None:
    root = Path("/root-of-the-model")
    name = "/".join(parts)
    for candidate in (
        name,
        f"{name}.gguf",
        f"{name}/model.safetensors",
        f"additional_chat_templates/{name}.jinja",
    ):
        if is_safe(candidate):
            assert Path(str(root / candidate)).resolve().is_relative_to(root)
            assert not any(part in ("", ".", "..") for part in candidate.split("/"))


def test_weights_of_other_programs_are_left() -> None:
    names = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    ]
    assert choose_files(names, HubId("hf", "o/n")).files == ("config.json", "model.safetensors")
