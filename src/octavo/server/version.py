"""GET /version: what serves, for people who compare machines."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from pathlib import Path

from fastapi import APIRouter, Request

import octavo
from octavo.engine.model_info import ModelInfo
from octavo.engine.request_record import printable

router = APIRouter()


@router.get("/version")
async def version(request: Request) -> dict[str, str]:
    """Versions, the backend, and the fingerprint that answers carry. An empty text: not known, or none."""
    return build_labels(request.app.state.engine.info)


def build_labels(info: ModelInfo) -> dict[str, str]:
    """What serves a model. isa: the instruction set of the native kernels."""
    return {
        "version": octavo.__version__,
        "commit": commit(),
        "torch": importlib.metadata.version("torch"),
        "backend": info.backend,
        "isa": info.isa,
        "model": printable(info.name),
        "fingerprint": info.fingerprint,
    }


@functools.cache
def commit() -> str:
    """The commit that this was built from: of the checkout that it runs in, or what pip noted when it
    installed from a repository (PEP 610)."""
    root = Path(octavo.__file__).parents[2]
    if (root / "pyproject.toml").is_file() and (root / ".git").exists():
        return _head(root / ".git")
    try:
        noted = importlib.metadata.distribution("octavo").read_text("direct_url.json")
        return str(json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""


def _head(git: Path) -> str:
    """The commit that HEAD names, of a repository or a worktree of it (gitrepository-layout(5))."""
    try:
        if git.is_file():
            git = Path(git.read_text().removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.is_file() else git
        if (common / name).is_file():
            return (common / name).read_text().strip()
        packed = (common / "packed-refs").read_text().splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    except OSError:
        return ""
