"""Fetches models from Hugging Face's hub, into the cache that its own library keeps.

Rule: the library moves the bytes, so that its cache, mirrors, tokens and proxies work as its users know
them; what it brought is then checked against the hashes that the hub states, since over HTTP the library
compares sizes alone. Files that were in the cache before are taken as they are: other programs put them
there too.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from octavo.errors import DownloadError, ModelNotFoundError, OctavoError
from octavo.weights.fetching import Fetched, check_room, progress_bar, sha256_of
from octavo.weights.hub import Choice, HubId, cached_choice, choose_files

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 20.0
_POLL_SECONDS = 0.1


def fetch_from_hugging_face(hub_id: HubId, *, progress: bool, offline: bool) -> Fetched:
    """The model's directory or GGUF file in Hugging Face's cache, fetched where it is not there yet.

    Where the hub can't be asked, what is cached is used, with a warning. Raises ModelNotFoundError,
    UnsupportedModelError and DownloadError.
    """
    if offline:
        if (cached := _cached(hub_id)) is not None:
            return cached
        raise DownloadError(
            f"{hub_id} is not complete in {constants.HF_HUB_CACHE}, and offline mode is on; run "
            f"`octavo pull {hub_id}` once with a network"
        )
    try:
        with _translated(hub_id):
            info = huggingface_hub.HfApi().model_info(
                hub_id.repo, revision=hub_id.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
    except OctavoError as error:
        if (cached := _cached(hub_id)) is None:
            raise
        logger.warning("%s; using what is cached of %s", error, hub_id)
        return cached
    return _fetch(hub_id, info, progress=progress)


def _fetch(hub_id: HubId, info: ModelInfo, *, progress: bool) -> Fetched:
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
    choice = choose_files(siblings, hub_id)
    new = [siblings[name] for name in choice.files if not _is_cached(hub_id, name, info.sha)]
    nbytes = sum(sibling.size or 0 for sibling in new)
    check_room(Path(constants.HF_HUB_CACHE), nbytes, str(hub_id))
    with (
        _translated(hub_id),
        progress_bar(f"Fetching {hub_id}", nbytes, enabled=progress and bool(new)) as show,
        _watched(_blobs(hub_id), show),
        _quiet(),
    ):
        folder = Path(
            huggingface_hub.snapshot_download(
                hub_id.repo, revision=hub_id.revision, allow_patterns=list(choice.files)
            )
        )
    if folder.name != info.sha:
        raise DownloadError(f"{hub_id} changed on the hub while it was fetched; run the same command again")
    wrong = [text for sibling in new if (text := _mismatch(folder / sibling.rfilename, sibling))]
    if wrong:
        raise DownloadError(
            f"what came of {hub_id} is not what the hub names: {'; '.join(wrong)}. It was deleted. Try "
            "again; if it stays so, a mirror or proxy serves something else"
        )
    licence = info.card_data.get("license") if info.card_data is not None else None
    return _fetched(folder, choice, licence if isinstance(licence, str) else "")


def _fetched(folder: Path, choice: Choice, licence: str = "") -> Fetched:
    nbytes = sum((folder / name).stat().st_size for name in choice.files)
    path = folder / choice.target if choice.target else folder
    return Fetched(path=path, nbytes=nbytes, licence=licence, revision=folder.name)


def _cached(hub_id: HubId) -> Fetched | None:
    """What the cache holds, without asking the hub; None unless that is a whole model."""
    where: dict[str, Any] = {"repo_id": hub_id.repo, "revision": hub_id.revision}
    try:
        folder = Path(huggingface_hub.snapshot_download(**where, allow_patterns=[], local_files_only=True))
    except Exception:  # the library has no common base for its errors; all of them mean: not there
        return None
    present = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        names = [file.path for file in huggingface_hub.get_cached_repo_tree(**where)]
    except Exception:  # put there by an older version, which kept no list of what there is
        names = present
    choice = cached_choice(folder, present, names, hub_id)
    return None if choice is None else _fetched(folder, choice)


def _is_cached(hub_id: HubId, name: str, commit: str | None) -> bool:
    return isinstance(huggingface_hub.try_to_load_from_cache(hub_id.repo, name, revision=commit), str)


def _mismatch(path: Path, sibling: RepoSibling) -> str:
    """Compare a file with its SHA-256 or, where git keeps it, with git's name for its content. "" if they
    are equal; else the file is deleted, and this says what differs."""
    if sibling.lfs is not None:
        expected, got = sibling.lfs.sha256, sha256_of(path)
    elif sibling.blob_id is not None:
        data = path.read_bytes()
        expected, got = sibling.blob_id, hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()
    else:
        return ""
    if got == expected:
        return ""
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    return f"{sibling.rfilename} has the hash {got}, expected {expected}"


def _blobs(hub_id: HubId) -> Path:
    return Path(constants.HF_HUB_CACHE, "--".join(["models", *hub_id.repo.split("/")]), "blobs")


@contextmanager
def _watched(folder: Path, show: Callable[[int], None]) -> Iterator[None]:
    """Tell `show` how many bytes have come into the folder: the library's own bars differ by version."""
    before = _bytes_in(folder)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            show(max(0, _bytes_in(folder) - before))

    thread = threading.Thread(target=watch, name="octavo-fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # renamed while we look
    return total


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's own progress bars."""
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _translated(hub_id: HubId) -> Iterator[None]:
    page = f"{constants.ENDPOINT}/{hub_id.repo}"
    try:
        yield
    except OctavoError:
        raise
    except GatedRepoError as error:
        raise DownloadError(
            f"{hub_id.repo} is gated: accept its licence at {page}, and set HF_TOKEN to a token of the "
            "account that did (https://huggingface.co/settings/tokens)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelNotFoundError(
            f"{hub_id.repo} has no revision {hub_id.revision!r} on the hub; see {page}/commits"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file or directory {hub_id.repo!r}, and no such model on the hub ({page}); if it is "
            "a private one, set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = (
            "set HF_TOKEN to a token that may read it"
            if status in (401, 403)
            else "try again later, or run with --offline if it was fetched before"
        )
        raise DownloadError(
            f"the hub answered {status} for {hub_id.repo}: {str(error).strip()[:300]}; {hint}"
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"{hub_id} could not be stored under {constants.HF_HUB_CACHE}: {error.strerror}. Free some "
                "space, or set HF_HOME to a folder elsewhere"
            ) from error
        raise _unreachable(hub_id, error) from error
    except Exception as error:  # its HTTP client's, which differs between versions of the library
        raise _unreachable(hub_id, error) from error


def _unreachable(hub_id: HubId, error: Exception) -> DownloadError:
    return DownloadError(
        f"{hub_id} could not be fetched from {constants.ENDPOINT}: {type(error).__name__}: "
        f"{str(error)[:300]}. Check the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy), or run "
        "with --offline if it was fetched before"
    )
