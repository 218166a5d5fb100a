"""Turns what a user calls a model into the path of a file or directory.

Rule: a name means the same thing in every working directory, so the catalog's names win over
folders that happen to be called alike; anything else is named by its path.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.weights.catalog import CATALOG, fetch


def resolve_model(name_or_path: str, cache_dir: Path, *, progress: bool) -> Path:
    """What `name_or_path` stands for: the path of a GGUF file or of a directory with a config.json, or a
    catalog name that is fetched.

    progress: show a progress bar on standard error while fetching. Raises ModelNotFoundError,
    UnsupportedModelError for what exists but is neither, and DownloadError.
    """
    if entry := CATALOG.get(name_or_path):
        return fetch(entry, cache_dir, progress=progress)
    path = os.path.expanduser(name_or_path)
    # os.path's tests answer False where Path's raise: names too long, or with a NUL in them.
    if path.lower().endswith(".gguf") and os.path.isfile(path):
        return Path(path)
    if path and os.path.isfile(os.path.join(path, "config.json")):
        return Path(path)
    if path and os.path.exists(path):
        kind = "a directory without config.json" if os.path.isdir(path) else "not a .gguf file"
        raise UnsupportedModelError(
            f"{path} is {kind}. Served are GGUF files, directories in Hugging Face's layout (config.json and "
            f"*.safetensors), and the catalog's models ({', '.join(sorted(CATALOG))}): give the path of one, "
            "or one of these names"
        )
    raise ModelNotFoundError(_not_found(name_or_path))


def _not_found(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return (
        f"there is no file {name[:200]!r}, and no model of that name in the catalog.{hint} "
        f"The catalog has: {', '.join(sorted(CATALOG))}"
    )
