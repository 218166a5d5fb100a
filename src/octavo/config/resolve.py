"""From flags, environment and defaults to one frozen config.

Rule: resolved once, in this order: an explicit value, else OCTAVO_<NAME>, else the default. Where each
value came from is kept, for `octavo serve --explain-config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import env
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.errors import ConfigError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, and where each of its values came from."""

    config: EngineConfig
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class ResolvedServer:
    """The server's own settings, and where each came from."""

    config: ServerConfig
    origins: dict[str, str]


def resolve(explicit: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    """Resolve settings; explicit values of None count as not given."""
    values, origins = _resolve(EngineConfig, explicit, environ)
    if not values["cache_dir"]:
        values["cache_dir"] = str(env.default_cache_dir())
    return Resolved(EngineConfig(**values), origins)


def resolve_server(explicit: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ResolvedServer:
    """Resolve the server's own settings in the same way."""
    values, origins = _resolve(ServerConfig, explicit, environ)
    return ResolvedServer(ServerConfig(**values), origins)


def _resolve(
    schema: type, explicit: Mapping[str, Any], environ: Mapping[str, str] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """A value for each setting of the schema, and where it came from."""
    fields = {field.name: field for field in dataclasses.fields(schema)}
    unknown = sorted(set(explicit) - set(fields))
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)}; known: {', '.join(fields)}")
    given = env.read(list(fields)) if environ is None else env.read(list(fields), environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, field in fields.items():
        if explicit.get(name) is not None:
            values[name], origins[name] = explicit[name], "given"
        elif name in given:
            variable, text = given[name]
            values[name], origins[name] = _parse(variable, text, type(field.default)), variable
        else:
            values[name], origins[name] = field.default, "default"
        if isinstance(field.default, tuple):  # a list, in which each item may be several
            values[name] = tuple(part.strip() for item in values[name] for part in item.split(","))
    return values, origins


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is tuple:
        return (text,)
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{variable} is {text!r}; write true or false")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}, which is no {kind.__name__}") from None
