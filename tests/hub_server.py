"""A small HTTP server that speaks what the clients of Hugging Face's hub and of ModelScope ask of theirs.

    with HubServer() as hub:
        hub.add("org/name", {"config.json": b"{}"})
        hub.cut["model.safetensors"] = 1000      # the first answer breaks off there

Every request is noted in `requests`, as (method, path, Range header).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


def git_sha1(data: bytes) -> str:
    """git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()


def is_lfs(name: str) -> bool:
    """Whether the hub keeps such a file outside git."""
    return name.endswith((".safetensors", ".gguf", ".bin"))


class HubServer:
    """Both hubs at `url`. refuse and refuse_files: what is answered instead of a repository's list, or of its
    files, as (status, headers)."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.licences: dict[str, str] = {}
        self.cut: dict[str, int] = {}
        self.corrupt: set[str] = set()
        self.ignores_ranges = False
        self.refuse: dict[str, tuple[int, dict[str, str]]] = {}
        self.refuse_files: dict[str, tuple[int, dict[str, str]]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.authorisations: list[str | None] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, repo: str, files: dict[str, bytes], licence: str = "") -> None:
        """Publish a repository, or its next commit."""
        self.repos[repo] = files
        self.licences[repo] = licence

    def commit(self, repo: str) -> str:
        """The commit that a repository is at."""
        listed = sorted((name, git_sha1(data)) for name, data in self.repos[repo].items())
        return hashlib.sha1(repr(listed).encode()).hexdigest()

    def fetched(self) -> list[str]:
        """Names of files whose bytes were asked for, in order."""
        names = []
        for method, path, _ in self.requests:
            url = urlsplit(path)
            if method == "GET" and "/resolve/" in path:
                names.append(unquote(url.path.split("/resolve/")[1].split("/", 1)[1]))
            elif method == "GET" and "FilePath" in url.query:
                names.append(parse_qs(url.query)["FilePath"][0])
        return names


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self) -> None:
        hub = self.server_hub
        hub.requests.append((self.command, self.path, self.headers.get("Range")))
        hub.authorisations.append(self.headers.get("Authorization"))
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:3] == ["api", "v1", "models"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], query)
        elif parts[:2] == ["api", "models"]:
            self._hugging_face_api("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._send(404, b"")

    def _refused(self, repo: str, *, missing: dict[str, str]) -> bool:
        hub = self.server_hub
        if repo in hub.refuse:
            status, headers = hub.refuse[repo]
            self._send(status, b"{}", headers)
        elif repo not in hub.repos:
            self._send(404, b"{}", missing)
        else:
            return False
        return True

    # -- Hugging Face -----------------------------------------------------------------------------

    def _hugging_face_api(self, repo: str, rest: list[str]) -> None:
        hub = self.server_hub
        if self._refused(repo, missing={"X-Error-Code": "RepoNotFound"}):
            return
        if len(rest) > 1 and rest[1] not in ("main", hub.commit(repo)):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif rest[:1] == ["tree"]:
            self._send_json([self._tree_entry(name, data) for name, data in hub.repos[repo].items()])
        else:
            siblings = [self._sibling(name, data) for name, data in hub.repos[repo].items()]
            card = {"cardData": {"license": hub.licences[repo]}} if hub.licences[repo] else {}
            self._send_json({"id": repo, "sha": hub.commit(repo), "siblings": siblings} | card)

    def _sibling(self, name: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
        if is_lfs(name):
            entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 1}
        return entry

    def _tree_entry(self, name: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
        if is_lfs(name):
            entry["lfs"] = {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 1}
        return entry

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        hub = self.server_hub
        if self._refused(repo, missing={"X-Error-Code": "RepoNotFound"}):
            return
        data = hub.repos[repo].get(name)
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(data).hexdigest() if is_lfs(name) else git_sha1(data)
        self._send_file(repo, name, {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit(repo)})

    # -- ModelScope -------------------------------------------------------------------------------

    def _modelscope(self, repo: str, rest: list[str], query: dict[str, str]) -> None:
        hub = self.server_hub
        if self._refused(repo, missing={}):
            return
        if query.get("Revision") != "master":
            self._send(404, b"{}")
        elif rest == ["repo", "files"]:
            entries: list[dict[str, Any]] = [{"Path": "folder", "Type": "tree", "Size": 0}]
            for name, data in hub.repos[repo].items():
                sha256 = hashlib.sha256(data).hexdigest()
                entries.append({"Path": name, "Type": "blob", "Size": len(data), "Sha256": sha256})
            self._send_json({"Code": 200, "Success": True, "Data": {"Files": entries}})
        elif rest == ["repo"] and query.get("FilePath") in hub.repos[repo]:
            self._send_file(repo, query["FilePath"], {})
        else:
            self._send(404, b"{}")

    # -- answers ----------------------------------------------------------------------------------

    def _send_file(self, repo: str, name: str, headers: dict[str, str]) -> None:
        hub = self.server_hub
        if repo in hub.refuse_files:
            refusal, more = hub.refuse_files[repo]
            self._send(refusal, b"{}", more)
            return
        data = hub.repos[repo][name]
        if name in hub.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, start = 200, 0
        wanted = self.headers.get("Range")
        if wanted is not None and not hub.ignores_ranges:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            status = 206
            headers = headers | {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        cut = hub.cut.pop(name, None) if self.command == "GET" else None
        self._send(status, data[start:], headers, cut=cut)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def repository(make: Callable[[int], bytes]) -> dict[str, bytes]:
    """Files of a model in Hugging Face's layout, two shards, and some that nobody needs.

    make: random bytes of a length.
    """
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": make(5000),
        "tokenizer_config.json": b'{"x": 1}',
        "special_tokens_map.json": b'{"bos_token": "<s>"}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        shards[0]: make(300_000),
        shards[1]: make(200_000),
        "consolidated.safetensors": make(500),
        "pytorch_model.bin": make(500),
        "model.onnx": make(500),
        "README.md": b"words",
        ".gitattributes": b"lfs",
    }


#: Of these, what is needed.
NEEDED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
