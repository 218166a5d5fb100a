"""Fetches models from ModelScope.

    GET {endpoint}/api/v1/models/{org}/{name}/repo/files?Revision=&Recursive=True    paths, sizes, SHA-256
    GET {endpoint}/api/v1/models/{org}/{name}/repo?Revision=&FilePath=               a file's bytes

Rule: a file gets its final name when its size and SHA-256 are those of the listing; until then it is a
`.part` that a later call goes on with. What each file is to be is noted before it is fetched, so that
later calls know by name and size, and what an interrupted call left behind is no whole model. Source: the
protocol of ModelScope's Python client.

    <cache>/modelscope/<org>/<name>/<revision>/{config.json, ..., .octavo.json, .lock}
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from octavo.config import env
from octavo.errors import CheckpointError, ConfigError, DownloadError, ModelNotFoundError
from octavo.weights.fetching import Fetched, check_room, locked, progress_bar, sha256_of
from octavo.weights.hub import Choice, HubId, cached_choice, choose_files, is_safe
from octavo.weights.model_directory import read_json_object

logger = logging.getLogger(__name__)

ENDPOINT = "https://modelscope.cn"
DEFAULT_REVISION = "master"
_NOTES = ".octavo.json"
_MAX_LISTING_BYTES = 32 << 20
_TIMEOUT_SECONDS = 30.0
_ATTEMPTS = 5  # in a row that bring nothing
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the listing has it. sha256: "" where the server states none."""

    size: int
    sha256: str


def fetch_from_modelscope(hub_id: HubId, cache_dir: Path, *, progress: bool, offline: bool) -> Fetched:
    """The model's directory or GGUF file under `cache_dir`, fetched where it is not there yet.

    Where the hub can't be asked, what is cached is used, with a warning. Raises ModelNotFoundError,
    UnsupportedModelError and DownloadError.
    """
    revision = hub_id.revision or DEFAULT_REVISION
    folder = cache_dir / "modelscope" / hub_id.repo / quote(revision, safe="")
    if offline:
        if (cached := _cached(hub_id, folder)) is not None:
            return cached
        raise DownloadError(
            f"{hub_id} is not complete in {folder}, and offline mode is on; run `octavo pull {hub_id}` once "
            "with a network"
        )
    with _client() as client:
        try:
            listing = _list(client, hub_id, revision)
        except (DownloadError, ModelNotFoundError) as error:
            if (cached := _cached(hub_id, folder)) is None:
                raise
            logger.warning("%s; using what is cached of %s", error, hub_id)
            return cached
        choice = choose_files(listing, hub_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                _fetch_all(client, hub_id, folder, listing, choice, progress=progress)
        except OSError as error:
            raise DownloadError(
                f"{hub_id} could not be stored under {folder}: {error}; free some space or choose another "
                "cache directory"
            ) from error
    return _fetched(folder, choice)


def _client() -> httpx.Client:
    endpoint = env.foreign("MODELSCOPE_ENDPOINT") or ENDPOINT
    token = env.foreign("MODELSCOPE_API_TOKEN")
    try:
        client = httpx.Client(base_url=endpoint, timeout=_TIMEOUT_SECONDS, follow_redirects=True)
    except httpx.InvalidURL as error:
        raise ConfigError(f"MODELSCOPE_ENDPOINT is {endpoint[:200]!r}, which is no URL: {error}") from error
    client.headers["Accept-Encoding"] = "identity"
    if token:  # both, as its own client does: some paths look at the one. httpx keeps them from other hosts.
        client.headers["Authorization"] = f"Bearer {token}"
        client.cookies.set("m_session_id", token, domain=client.base_url.host)
    return client


def _list(client: httpx.Client, hub_id: HubId, revision: str) -> dict[str, RemoteFile]:
    """The repository's files, by path."""
    try:
        response = client.get(
            f"/api/v1/models/{hub_id.repo}/repo/files", params={"Revision": revision, "Recursive": "True"}
        )
    except httpx.HTTPError as error:
        raise _unreachable(client, hub_id, error) from error
    _check_status(client, hub_id, response)
    try:
        if len(response.content) > _MAX_LISTING_BYTES:
            raise ValueError(f"it has {len(response.content)} bytes")
        files = json.loads(response.content)["Data"]["Files"]
        return {entry["Path"]: _remote_file(entry) for entry in files if entry.get("Type") != "tree"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DownloadError(
            f"{client.base_url} did not answer with a list of {hub_id.repo}'s files ({error!r:.200}); if "
            "MODELSCOPE_ENDPOINT is set, check that it names ModelScope or a mirror of it"
        ) from error


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    size, sha256 = entry["Size"], entry.get("Sha256") or ""
    if type(size) is not int or not 0 <= size < 2**63 or not isinstance(sha256, str):
        raise ValueError(f"{str(entry['Path'])[:80]!r} has the size {size!r:.40} and the hash {sha256!r:.80}")
    return RemoteFile(size, sha256.lower())


def _check_status(client: httpx.Client, hub_id: HubId, response: httpx.Response) -> None:
    page = f"{client.base_url}/models/{hub_id.repo}"
    if response.status_code in (401, 403):
        raise DownloadError(
            f"ModelScope does not give {hub_id.repo} to everybody: accept its terms at {page}, and set "
            "MODELSCOPE_API_TOKEN to a token of the account that did"
        )
    if response.status_code == 404:
        raise ModelNotFoundError(
            f"there is no model {hub_id.repo!r} of revision {hub_id.revision or DEFAULT_REVISION!r} on "
            f"ModelScope ({page}); if it is a private one, set MODELSCOPE_API_TOKEN"
        )
    if response.status_code not in (200, 206):
        raise DownloadError(
            f"ModelScope answered {response.status_code} for {hub_id.repo}; try again later, or run with "
            "--offline if it was fetched before"
        )


def _fetch_all(
    client: httpx.Client,
    hub_id: HubId,
    folder: Path,
    listing: dict[str, RemoteFile],
    choice: Choice,
    *,
    progress: bool,
) -> None:
    new = [name for name in choice.files if not _is_there(folder, name, listing[name], _read_notes(folder))]
    missing = sum(listing[name].size - _part_size(folder, name, listing[name]) for name in new)
    check_room(folder, missing, str(hub_id))
    _note(folder, listing, choice)
    total = sum(listing[name].size for name in new)
    done = 0
    with progress_bar(f"Fetching {hub_id}", total, enabled=progress and bool(new)) as show:
        for name in new:
            _fetch_one(client, hub_id, folder, name, listing[name], partial(_show_sum, show, done))
            done += listing[name].size


def _show_sum(show: Callable[[int], None], done: int, of_file: int) -> None:
    show(done + of_file)


def _fetch_one(
    client: httpx.Client,
    hub_id: HubId,
    folder: Path,
    name: str,
    file: RemoteFile,
    show: Callable[[int], None],
) -> None:
    if not file.sha256 and name.endswith((".safetensors", ".gguf")):
        raise DownloadError(f"ModelScope states no SHA-256 of {name} of {hub_id}, so it can't be verified")
    part = _part(folder, name, file)
    part.parent.mkdir(parents=True, exist_ok=True)
    _download(client, hub_id, name, file.size, part, show)
    size = part.stat().st_size
    got = sha256_of(part) if file.sha256 else ""
    if (size, got) != (file.size, file.sha256):
        part.unlink()
        raise DownloadError(
            f"{name} of {hub_id} is not the file that the hub lists: it has {size} bytes and the SHA-256 "
            f"{got or 'of none'}, expected {file.size} and {file.sha256 or 'none'}. It was deleted. Try "
            "again; if it stays so, a mirror or proxy serves something else"
        )
    with part.open("rb") as whole:
        os.fsync(whole.fileno())  # later calls trust the notes alone, also after a power cut
    part.replace(folder / name)


def _download(
    client: httpx.Client, hub_id: HubId, name: str, size: int, part: Path, show: Callable[[int], None]
) -> None:
    """Bring `part` to `size` bytes, going on where it ends; a connection that breaks is made anew."""
    attempts = 0
    part.touch()
    while (have := part.stat().st_size) < size:
        try:
            _download_some(client, hub_id, name, size, part, show)
        except httpx.TransportError as error:
            attempts = 1 if part.stat().st_size > have else attempts + 1
            if attempts == _ATTEMPTS:
                raise _unreachable(client, hub_id, error) from error
            logger.warning("fetching %s broke off (%r); going on in a moment", name, error)
            time.sleep(_RETRY_SECONDS)
        except httpx.HTTPError as error:
            raise _unreachable(client, hub_id, error) from error
        else:
            if part.stat().st_size < size:
                break  # a sound answer, and a short one: the caller sees that the size is wrong


def _download_some(
    client: httpx.Client, hub_id: HubId, name: str, size: int, part: Path, show: Callable[[int], None]
) -> None:
    revision = hub_id.revision or DEFAULT_REVISION
    have = part.stat().st_size
    with client.stream(
        "GET",
        f"/api/v1/models/{hub_id.repo}/repo",
        params={"Revision": revision, "FilePath": name},
        headers={"Range": f"bytes={have}-"} if have else {},
    ) as response:
        _check_status(client, hub_id, response)
        goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status_code == 206 and not goes_on:
            raise DownloadError(
                f"{client.base_url} sent another part of {name} than was asked for; try again"
            )
        if response.status_code == 200:
            have = 0  # the server sends it from the start
        with part.open("ab" if have else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk[: size + 1 - have])  # one byte too many betrays a longer file
                have += len(chunk)
                show(have)
                if have > size:
                    break


def _part(folder: Path, name: str, file: RemoteFile) -> Path:
    """Named after the content, so that a file that changed on the hub is not appended to the old one."""
    return folder / f"{name}.{file.sha256[:16] or 'unhashed'}.part"


def _part_size(folder: Path, name: str, file: RemoteFile) -> int:
    try:
        return min(_part(folder, name, file).stat().st_size, file.size)
    except OSError:
        return 0


def _is_there(folder: Path, name: str, file: RemoteFile, notes: dict[str, RemoteFile]) -> bool:
    """A file has its final name only if it was verified to be what the notes say."""
    try:
        return notes.get(name) == file and (folder / name).stat().st_size == file.size
    except OSError:
        return False


def _read_notes(folder: Path) -> dict[str, RemoteFile]:
    """What the files under the folder are, or are to be; what is not noted is fetched again."""
    try:
        notes = read_json_object(folder / _NOTES, _MAX_LISTING_BYTES)
        return {
            name: RemoteFile(note["size"], note["sha256"]) for name, note in notes.items() if is_safe(name)
        }
    except (CheckpointError, KeyError, TypeError):
        return {}


def _note(folder: Path, listing: dict[str, RemoteFile], choice: Choice) -> None:
    """Note what is about to be fetched, after removing what it replaces and what a branch no longer has: a
    reader would take old weights for the model's own."""
    old = _read_notes(folder)
    kept = {name: file for name, file in old.items() if listing.get(name) == file}
    for name in old.keys() - kept.keys():
        (folder / name).unlink(missing_ok=True)
    wanted = kept | {name: listing[name] for name in choice.files}
    new = folder / f"{_NOTES}.new"
    new.write_text(json.dumps({name: asdict(file) for name, file in wanted.items()}, indent=1))
    new.replace(folder / _NOTES)


def _cached(hub_id: HubId, folder: Path) -> Fetched | None:
    """What was fetched before; None unless that is a whole model."""
    notes = _read_notes(folder)
    present = [name for name, file in notes.items() if _is_there(folder, name, file, notes)]
    choice = cached_choice(folder, present, notes, hub_id)
    return None if choice is None else _fetched(folder, choice)


def _fetched(folder: Path, choice: Choice) -> Fetched:
    nbytes = sum((folder / name).stat().st_size for name in choice.files)
    return Fetched(
        path=folder / choice.target if choice.target else folder, nbytes=nbytes, revision=folder.name
    )


def _unreachable(client: httpx.Client, hub_id: HubId, error: Exception) -> DownloadError:
    return DownloadError(
        f"{hub_id} could not be fetched from {client.base_url}: {type(error).__name__}: {str(error)[:300]}. "
        "Check the network (MODELSCOPE_ENDPOINT names a mirror, HTTPS_PROXY a proxy), or run with --offline "
        "if it was fetched before"
    )
