"""Turns what a user calls a model into the path of a file or directory.

Rule: a name of the catalog means the same thing in every working directory, so these win over folders
that happen to be called alike; then comes what exists under that path; then the hubs. What is written as
a path (./, ../, /, ~, or ending in .gguf) is never looked for on a hub, and what a hub is named for
(hf:org/name, modelscope:org/name) nowhere else.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.weights.catalog import CATALOG, fetch
from octavo.weights.fetching import Fetched
from octavo.weights.hub import MODELSCOPE, HubId, check_not_split, parse_hub_id

_PATH_STARTS = ("./", "../", "/", "~")


def resolve_model(name_or_path: str, cache_dir: Path, *, progress: bool, offline: bool = False) -> Path:
    """What `name_or_path` stands for: the path of a GGUF file or of a directory with a config.json. See
    `fetch_model`."""
    return fetch_model(name_or_path, cache_dir, progress=progress, offline=offline).path


def fetch_model(name_or_path: str, cache_dir: Path, *, progress: bool, offline: bool = False) -> Fetched:
    """Find a model by its path, its catalog name or its id on a hub, fetching it if need be.

    progress: show a progress bar on standard error while fetching. offline: touch no network. Raises
    ModelNotFoundError, UnsupportedModelError for what exists but is no model, and DownloadError.
    """
    if entry := CATALOG.get(name_or_path):
        file = fetch(entry, cache_dir, progress=progress, offline=offline)
        return Fetched(path=file, nbytes=entry.file_bytes, licence=entry.licence, revision=entry.version)
    if (path := _local(name_or_path)) is not None:
        return Fetched(path=path, nbytes=_nbytes(path))
    hub_id = parse_hub_id(name_or_path)
    if hub_id is None or _is_written_as_path(name_or_path):
        raise ModelNotFoundError(_not_found(name_or_path))
    return _fetch_from_hub(hub_id, cache_dir, progress=progress, offline=offline)


def _local(name_or_path: str) -> Path | None:
    """The path if there is something, and it is a model."""
    path = os.path.expanduser(name_or_path)
    # os.path's tests answer False where Path's raise: names too long, or with a NUL in them.
    if path.lower().endswith(".gguf") and os.path.isfile(path):
        check_not_split(path)
        return Path(path)
    if path and os.path.isfile(os.path.join(path, "config.json")):
        return Path(path)
    if not path or not os.path.exists(path):
        return None
    kind = "a directory without config.json" if os.path.isdir(path) else "not a .gguf file"
    meant = f" For the hub's model of that name, write hf:{path}." if parse_hub_id(path) is not None else ""
    raise UnsupportedModelError(
        f"{path} is {kind}. Served are GGUF files, directories in Hugging Face's layout (config.json and "
        f"*.safetensors), and the catalog's models ({', '.join(sorted(CATALOG))}): give the path of one, "
        f"or one of these names.{meant}"
    )


def _is_written_as_path(name: str) -> bool:
    return name.startswith(_PATH_STARTS) or (name.lower().endswith(".gguf") and ":" not in name)


def _fetch_from_hub(hub_id: HubId, cache_dir: Path, *, progress: bool, offline: bool) -> Fetched:
    # Imported here: the libraries take a while, and most models lie on the disk.
    if hub_id.hub == MODELSCOPE:
        from octavo.weights.modelscope import fetch_from_modelscope

        return fetch_from_modelscope(hub_id, cache_dir, progress=progress, offline=offline)
    from octavo.weights.huggingface import fetch_from_hugging_face

    return fetch_from_hugging_face(hub_id, progress=progress, offline=offline)


def _nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _not_found(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"there is no file {name[:200]!r}, and no model of that name in the catalog.{hint} "
        f"The catalog has: {', '.join(sorted(CATALOG))}. Models on Hugging Face are called org/name, those "
        "on ModelScope modelscope:org/name"
    )
