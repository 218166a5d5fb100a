"""Settings: explicit values, then the environment, then defaults; resolved once, refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.config import env
from octavo.config.resolve import resolve, resolve_server
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.errors import ConfigError

FIELDS = dataclasses.fields(EngineConfig)
SERVER_FIELDS = dataclasses.fields(ServerConfig)
SOURCE = Path(octavo.__file__).parent


def test_explicit_then_environment_then_default() -> None:
    environ = {"OCTAVO_MAX_NUM_SEQS": "7", "OCTAVO_THREADS": "3", "UNRELATED": "1"}
    resolved = resolve({"max_num_seqs": 5, "threads": None}, environ)
    config = resolved.config
    assert (config.max_num_seqs, config.threads, config.max_num_batched_tokens) == (5, 3, 512)
    assert resolved.origins["max_num_seqs"] == "given"
    assert resolved.origins["threads"] == "OCTAVO_THREADS"
    assert resolved.origins["max_num_batched_tokens"] == "default"
    assert set(resolved.origins) == {field.name for field in FIELDS}


def test_explicit_values_that_are_false_count() -> None:
    environ = {"OCTAVO_PREFIX_CACHING": "true", "OCTAVO_THREADS": "3"}
    config = resolve({"prefix_caching": False, "threads": 0}, environ).config
    assert config.prefix_caching is False
    assert config.threads == 0


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_POLICY", "priority")
    assert resolve({}).config.policy == "priority"


def test_every_setting_can_come_from_the_environment() -> None:
    others: dict[str, Any] = {
        "model": "other", "backend": "torch", "kv_dtype": "f16", "dtype": "bf16", "quantization": "int8",
        "max_model_len": 10, "max_num_seqs": 9,
        "max_num_batched_tokens": 8, "kv_cache_gib": 0.5, "prefix_caching": False, "policy": "priority",
        "threads": 1, "activation_bits": "8", "cache_dir": "/tmp/here", "offline": True,
        "pre_tokenizer": "llama-bpe", "api_workers": 3, "chat_template": "/tmp/t.jinja",
    }  # fmt: skip
    assert set(others) == {field.name for field in FIELDS}, "a new setting: add a value for it here"
    environ = {f"OCTAVO_{name.upper()}": str(value) for name, value in others.items()}
    assert dataclasses.asdict(resolve({}, environ).config) == others


def test_hugging_faces_offline_variable_is_honoured() -> None:
    def offline(**environ: str) -> tuple[bool, str]:
        resolved = resolve({}, environ)
        return resolved.config.offline, resolved.origins["offline"]

    assert offline(HF_HUB_OFFLINE="1") == (True, "HF_HUB_OFFLINE")
    assert offline(HF_HUB_OFFLINE="") == (False, "default")
    assert offline(HF_HUB_OFFLINE="1", OCTAVO_OFFLINE="0") == (False, "OCTAVO_OFFLINE")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is 'maybe'"):
        offline(HF_HUB_OFFLINE="maybe")


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "on", "0", "false", "No", "off"])
def test_booleans(text: str) -> None:
    expected = text.lower() in ("1", "true", "yes", "on")
    assert resolve({}, {"OCTAVO_PREFIX_CACHING": text}).config.prefix_caching is expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("PREFIX_CACHING", "maybe", r"OCTAVO_PREFIX_CACHING is 'maybe'; write true or false"),
        ("PREFIX_CACHING", "", r"OCTAVO_PREFIX_CACHING is ''; write true or false"),
        ("MAX_NUM_SEQS", "many", r"OCTAVO_MAX_NUM_SEQS is 'many', which is no int"),
        ("MAX_NUM_SEQS", "8.5", r"OCTAVO_MAX_NUM_SEQS is '8\.5', which is no int"),
        ("MAX_NUM_SEQS", "", r"OCTAVO_MAX_NUM_SEQS is '', which is no int"),
        ("KV_CACHE_GIB", "4G", r"OCTAVO_KV_CACHE_GIB is '4G', which is no float"),
        ("KV_CACHE_GIB", "nan", r"kv_cache_gib is nan; it must be at least 0"),
        ("KV_CACHE_GIB", "inf", r"kv_cache_gib is inf; .* less than 2\*\*31"),
        ("BACKEND", "cuda", r"backend is 'cuda'; it must be one of auto, native, torch"),
        ("MODEL", "", r"model is empty; give a catalog name, a \.gguf file, a directory or a hub id"),
    ],
)
def test_what_the_environment_gets_wrong(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({}, {f"OCTAVO_{name}": text})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", 0, r"max_num_seqs is 0; it must be at least 1"),
        ("max_num_batched_tokens", -5, r"max_num_batched_tokens is -5; it must be at least 1"),
        ("max_model_len", -1, r"max_model_len is -1; it must be at least 0"),
        ("threads", 2**31, r"threads is 2147483648; .* less than 2\*\*31"),
        ("kv_cache_gib", -0.5, r"kv_cache_gib is -0\.5; it must be at least 0"),
        ("dtype", "int8", r"dtype is 'int8'; it must be one of auto, bf16, f16, f32"),
        ("quantization", "q4", r"quantization is 'q4'; it must be one of none, int8, int4"),
        ("kv_dtype", "int8", r"kv_dtype is 'int8'; it must be one of auto, f16, bf16, f32"),
        ("policy", "fair", r"policy is 'fair'; it must be one of fcfs, priority"),
        ("max_num_seqs", "8", r"max_num_seqs is '8', which is no int"),
        ("max_num_seqs", 8.0, r"max_num_seqs is 8\.0, which is no int"),
        ("threads", True, r"threads is True, which is no int"),
        ("prefix_caching", "no", r"prefix_caching is 'no', which is no bool"),
        ("prefix_caching", 1, r"prefix_caching is 1, which is no bool"),
        ("kv_cache_gib", "1", r"kv_cache_gib is '1', which is no float"),
        ("model", 3, r"model is 3, which is no str"),
    ],
)
def test_bounds_and_kinds(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({name: value}, {})


def test_whole_numbers_will_do_for_fractions() -> None:
    assert resolve({"kv_cache_gib": 2}, {}).config.kv_cache_gib == 2


def test_unknown_settings_are_named_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"^unknown settings: beams, modle; known: model, backend, "):
        resolve({"modle": "x", "beams": 3, "threads": 1}, {})


def test_a_config_is_frozen() -> None:
    config = resolve({}, {}).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 3  # type: ignore[misc]


def test_the_cache_follows_xdg(tmp_path: Path) -> None:
    assert resolve({}, {"XDG_CACHE_HOME": "/somewhere"}).config.cache_path != Path("/somewhere")
    assert env.default_cache_dir({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/octavo")
    assert env.default_cache_dir({}) == Path.home() / ".cache" / "octavo"
    assert resolve({"cache_dir": "~/models"}, {}).config.cache_path == Path.home() / "models"


def test_the_servers_settings_come_from_the_environment_too() -> None:
    others: dict[str, Any] = {
        "max_waiting": 3, "max_connections": 4, "drain_seconds": 1.5, "api_key": ("a", "b"),
        "api_key_file": "/keys", "allowed_hosts": ("x.example",),
    }  # fmt: skip
    assert set(others) == {field.name for field in SERVER_FIELDS}, "a new setting: add a value for it here"
    texts = {name: ",".join(v) if isinstance(v, tuple) else str(v) for name, v in others.items()}
    environ = {f"OCTAVO_{name.upper()}": text for name, text in texts.items()}
    assert dataclasses.asdict(resolve_server({}, environ).config) == others


def test_lists_may_be_repeated_and_have_commas() -> None:
    resolved = resolve_server({"api_key": ("a", "b, c"), "allowed_hosts": None}, {"OCTAVO_API_KEY": "z"})
    assert resolved.config.api_key == ("a", "b", "c")
    assert (resolved.origins["api_key"], resolved.origins["allowed_hosts"]) == ("given", "default")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("API_KEY", "", "api_key is empty"),  # whoever sets it does not mean: let everyone in
        ("API_KEY", "a,,b", "api_key is empty"),
        ("MAX_WAITING", "-1", r"max_waiting is -1; it must lie in 0\.\."),
        ("MAX_CONNECTIONS", "1e3", r"OCTAVO_MAX_CONNECTIONS is '1e3', which is no int"),
        ("DRAIN_SECONDS", "nan", r"drain_seconds is nan"),
    ],
)
def test_what_the_environment_gets_wrong_about_the_server(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_server({}, {f"OCTAVO_{name}": text})


def test_the_engine_does_not_take_the_servers_settings() -> None:
    with pytest.raises(ConfigError, match="unknown settings: api_key"):
        resolve({"api_key": ("a",)}, {})


def test_every_setting_has_help() -> None:
    for field in FIELDS + SERVER_FIELDS:
        help_ = field.metadata["help"]
        assert help_.endswith("."), field.name
        assert len(help_) > 20, field.name
        assert "\n" not in help_, field.name


def test_there_are_fewer_than_45_settings() -> None:
    assert len(FIELDS + SERVER_FIELDS) < 45


#: Reads no setting: it passes the whole environment on to pip, with another TMPDIR.
PASSES_ENVIRONMENT_ON = {"weights/catalog.py"}


def test_nobody_else_reads_the_environment() -> None:
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(word in path.read_text() for word in ("os.environ", "os.getenv", "import environ", "getenv("))
    }
    assert readers == {"config/env.py"} | PASSES_ENVIRONMENT_ON
