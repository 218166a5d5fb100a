"""Keys and names: who is let in, by which name, and what doesn't get around it."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
from pathlib import Path

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.server import ServerConfig
from octavo.errors import ConfigError
from octavo.server import auth
from octavo.server.auth import PUBLIC, Keys, load_keys
from octavo.server.hosts import Hosts, host_name, is_loopback
from raw_http import Answer, app_without_engine, exchange, head, listening

KEYS = ("sk-first", "sk-second")
RIGHT = {"Authorization": "Bearer sk-second"}
#: Ways to write a path that some routers, and some people, take for one of those after the arrow.
ODD_PATHS = [
    "//v1/models", "/v1//models", "/v1/../v1/models", "/health/../v1/models", "/./v1/models", "/v1/models/",
    "/v1/models/.", "/%76%31/models", "/v1%2fmodels", "/v1/%2e%2e/v1/models", "/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels", "/V1/MODELS", "/v1/models;/health", "/v1/models?/health", "/v1/models%00",
    "/v1/models%20", "/v1\\models", "/health/", "//health", "/HEALTH", "/health%00", "/health.", "/ready/x",
    "/health;x", "/ready%2f", "http://localhost/v1/models", "http://localhost//health", "/nowhere",
]  # fmt: skip


def ask(config: ServerConfig, *requests: bytes) -> list[Answer]:
    """Answers of an app that has no engine."""

    async def main() -> list[Answer]:
        async with listening(app_without_engine(config)) as port:
            return [await exchange(port, request) for request in requests]

    return asyncio.run(main())


def refused(answer: Answer) -> bool:
    if answer.status != 401:
        return False
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert (answer.error["type"], answer.error["code"]) == ("invalid_request_error", "invalid_api_key")
    return True


# -- keys -------------------------------------------------------------------------------------------


def routes(app: FastAPI) -> list[tuple[str, str]]:
    found = [(path, "GET") for path in ("/openapi.json",)]
    for path, methods in app.openapi()["paths"].items():
        found += [(path, method.upper()) for method in methods]
    found += [("/", "GET"), ("/console/console.js", "GET"), ("/console/console.css", "GET")]
    assert ("/v1/chat/completions", "POST") in found
    return found


def test_bug_S1_every_route_but_the_public_ones_wants_a_key() -> None:
    config = ServerConfig(api_key=KEYS)
    every = routes(app_without_engine(config))
    methods = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "QUERY"]
    asked = [(path, method) for path, method in every if path not in PUBLIC]
    asked += [(path, method) for path in ("/v1/chat/completions", "/metrics") for method in methods]
    assert {path for path, _ in every} >= PUBLIC
    for answer in ask(config, *(head(path, method, Connection="close") for path, method in asked)):
        assert answer.status == 401


@pytest.mark.parametrize("path", ODD_PATHS)
def test_bug_S1_odd_paths_do_not_get_around_the_key(path: str) -> None:
    without, wrong, right = ask(
        ServerConfig(api_key=KEYS),
        head(path),
        head(path, Authorization="Bearer sk-third"),
        head(path, **RIGHT),
    )
    for answer in (without, wrong):
        assert refused(answer) or (answer.status == 400 and answer.error["code"] == "invalid_http")
    assert not refused(right)


@pytest.mark.parametrize("path", ["*", "localhost:80", "/v1/mod els", "/\xff", "", "http://", "/\x00"])
def test_bug_S1_targets_that_are_no_paths(path: str) -> None:
    answers = ask(ServerConfig(api_key=KEYS), head(path), head(path, "OPTIONS"), head(path, "CONNECT"))
    assert all(answer.status in (400, 401) for answer in answers)


@pytest.mark.parametrize(
    "authorization",
    [
        "", "Bearer", "Bearer ", "sk-first", "Basic sk-first", "Bearer sk-firs", "Bearer sk-first1",
        "Bearer SK-FIRST", "Bearer sk-first sk-second", "Bearer sk-first,sk-second", 'Bearer "sk-first"',
        "Bearer\tsk-first", "Token sk-first", "Bearer " + "x" * 10_000, "Bearer \xe9", "Bearersk-first",
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_wrong_keys(authorization: str) -> None:
    (answer,) = ask(ServerConfig(api_key=KEYS), head("/v1/nowhere", Authorization=authorization))
    assert refused(answer)


@pytest.mark.parametrize("authorization", ["Bearer sk-first", "bearer sk-second", "BEARER   sk-first  "])
def test_right_keys(authorization: str) -> None:
    (answer,) = ask(ServerConfig(api_key=KEYS), head("/v1/nowhere", Authorization=authorization))
    assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_several_keys_in_one_request_are_none() -> None:
    twice = head("/v1/nowhere", Authorization="Bearer sk-first", authorization="Bearer sk-first")
    (answer,) = ask(ServerConfig(api_key=KEYS), twice)
    assert refused(answer)
    assert "several" in answer.error["message"]


def test_without_keys_everyone_is_let_in() -> None:
    (answer,) = ask(ServerConfig(), head("/v1/nowhere"))
    assert answer.status == 404


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.text())
def test_only_the_keys_open(keys: list[str], other: str) -> None:
    known = Keys(keys)
    for key in (*keys, other):
        header = b"Bearer " + key.encode(errors="surrogatepass")
        opens = known.let_in("/v1/models", header)
        assert opens == (key in keys and not set(key.encode()) & set(b" \t\n\r\x0b\x0c"))


@pytest.mark.parametrize("given", ["sk-first", "sk-second", "sk-third", "", "sk-first" * 50])
def test_bug_S7_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    compared: list[tuple[bytes, bytes]] = []

    class Spy:
        @staticmethod
        def compare_digest(a: bytes, b: bytes) -> bool:
            compared.append((a, b))
            return hmac.compare_digest(a, b)

    keys = Keys(KEYS)
    monkeypatch.setattr(auth, "hmac", Spy)
    assert keys.let_in("/v1/models", f"Bearer {given}".encode()) is (given in KEYS)
    assert len(compared) == len(KEYS)  # whichever it was, and whether it was there or not
    assert {len(each) for pair in compared for each in pair} == {32}  # and however long


def test_bug_S7_nothing_else_compares_them() -> None:
    keys = Keys(KEYS)
    assert all(key.encode() not in each for key in KEYS for each in keys._digests)
    keys_text = str(vars(keys)) + repr(keys)
    assert "sk-" not in keys_text


def test_bug_S7_a_prefix_is_as_wrong_as_any_key() -> None:
    keys = Keys(["abcdef"])
    for other in ("abcde", "abcdefg", "zzzzzz", "a"):
        assert not keys.let_in("/v1/models", f"Bearer {other}".encode())


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nsk-a\n\n  sk-b  \r\n#sk-c\n")
    keys = load_keys(["sk-d"], str(file))
    for key in ("sk-a", "sk-b", "sk-d"):
        assert keys.let_in("/v1/models", f"Bearer {key}".encode())
    assert len(keys) == 3
    assert not keys.let_in("/v1/models", b"Bearer sk-c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no keys"),
        (b"# sk-a\n\n", "has no keys"),
        (b"sk-a\nmy secret\n", r"key 2, from .*keys, can't be sent"),
        ("schlüssel\n".encode(), "can't be sent"),
        (b"\xff\xfe", "can't read keys"),
        (None, "can't read keys"),
    ],
)
def test_files_that_have_none(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_keys([], str(file))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("keys", [("",), ("sk-a", "")])
def test_an_empty_key_is_a_mistake(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="api_key is empty"):
        ServerConfig(api_key=keys)


def test_keys_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(api_key=KEYS)
    assert "sk-" not in repr(config)
    with caplog.at_level(logging.DEBUG):
        answers = ask(config, head("/v1/x", Authorization="Bearer sk-wrong"), head("/v1/x", **RIGHT))
    assert all(b"sk-" not in answer.body for answer in answers)
    assert "sk-" not in caplog.text
    assert dataclasses.replace(config, drain_seconds=1).api_key == KEYS


# -- names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost", "localhost"),
        (b"LocalHost:8000", "localhost"),
        (b"localhost.:8000", "localhost"),
        (b"127.0.0.1:8000", "127.0.0.1"),
        (b"[::1]:8000", "::1"),
        (b"[::1]", "::1"),
        (b"a.example:", "a.example"),
        (b"", None), (b".", None), (b":80", None), (b"::1", None), (b"[::1", None), (b"a b", None),
        (b"a/b", None), (b"user@localhost", None), (b"localhost:80:80", None), (b"localhost:x", None),
        (b"localhost,evil.example", "localhost,evil.example"), (b"[localhost]", None),
    ],
)  # fmt: skip
def test_the_name_in_a_host_header(header: bytes, name: str | None) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("bound", "allowed", "name", "accepted"),
    [
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "127.0.0.1", True),
        ("127.0.0.1", (), "::1", True),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "10.0.0.1", False),
        ("127.0.0.1", (), "2130706433", False),
        ("10.0.0.1", (), "10.0.0.1", True),
        ("10.0.0.1", (), "10.0.0.2", False),
        ("box", (), "box", True),
        ("0.0.0.0", (), "10.0.0.1", True),
        ("::", (), "10.0.0.1", True),
        ("0.0.0.0", (), "box", False),
        ("0.0.0.0", ("Box", "llm.example."), "box", True),
        ("0.0.0.0", ("Box", "llm.example."), "llm.example", True),
        ("0.0.0.0", ("Box",), "box.evil.example", False),
        ("127.0.0.1", ("*",), "evil.example", True),
    ],
)
def test_names_of_a_server(bound: str, allowed: tuple[str, ...], name: str, accepted: bool) -> None:
    assert Hosts(bound, allowed).accepts(name) is accepted


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions", "/", "/nowhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "169.254.1.1"]
)
def test_bug_S1_a_forged_host_is_refused_everywhere(path: str, host: str) -> None:
    (answer,) = ask(ServerConfig(), head(path, host=host))
    assert answer.status == 421
    assert answer.error["code"] == "unknown_host"
    assert f"--allowed-hosts {host.removesuffix(':8000')}" in answer.error["message"]


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost:\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: user@localhost\r\n\r\n",
    ],
)
def test_bug_S1_hosts_that_are_none_or_two(request_: bytes) -> None:
    (answer,) = ask(ServerConfig(), request_)
    assert (answer.status, answer.error["code"]) == (400, "invalid_host")


def test_allowed_hosts_and_old_clients() -> None:
    named, old, old_and_wrong = ask(
        ServerConfig(allowed_hosts=("llm.example",)),
        head("/nowhere", host="LLM.example:80"),
        b"GET /nowhere HTTP/1.0\r\n\r\n",
        b"GET /nowhere HTTP/1.0\r\nHost: evil.example\r\n\r\n",
    )
    assert (named.status, old.status, old_and_wrong.status) == (404, 404, 421)


def test_no_other_site_is_invited() -> None:
    preflight, get = ask(
        ServerConfig(),
        head("/v1/models", "OPTIONS", Origin="http://evil.example", Access_Control_Request_Method="POST"),
        head("/nowhere", Origin="http://evil.example"),
    )
    for answer in (preflight, get):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert preflight.status == 405


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("box", False)],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
