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
from octavo.errors import ConfigError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, and where each of its values came from."""

    config: EngineConfig
    origins: dict[str, str]


def resolve(explicit: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Resolved:
    """Resolve settings; explicit values of None count as not given."""
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
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
    if not values["cache_dir"]:
        values["cache_dir"] = str(env.default_cache_dir())
    return Resolved(EngineConfig(**values), origins)


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ConfigError(f"{variable} is {text!r}; write true or false")
        return text.lower() in _TRUE
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}, which is no {kind.__name__}") from None
