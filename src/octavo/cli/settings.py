"""The engine's settings as command-line flags, made from the schema."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from octavo.config.resolve import Resolved, ResolvedServer, resolve, resolve_server
from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig

SERVER_GROUP = Group("Server", sort_key=0)
_GROUP = Group("Engine", help="Each can also be set in the environment, as OCTAVO_<NAME>.", sort_key=1)


def _flag(field: dataclasses.Field[Any], kind: Any, group: Group) -> tuple[str, Any, Any]:
    default = "on" if field.default is True else field.default
    shown = f" [default: {default}]" if default not in ("", ()) else ""
    help_ = field.metadata["help"] + shown
    negative = "" if field.default == () else None  # a list needs no flag that empties it
    parameter = Parameter(help=help_, show_default=False, group=group, negative=negative)
    return field.name, Annotated[kind | None, parameter], dataclasses.field(default=None)


def _make_settings(name: str, schema: type, group: Group) -> type:
    kinds = get_type_hints(schema)
    flags = [_flag(field, kinds[field.name], group) for field in dataclasses.fields(schema)]
    made = dataclasses.make_dataclass(name, flags, kw_only=True, frozen=True)
    made.__module__ = __name__  # where cyclopts looks up the annotations
    return made


#: Dataclasses with a field for each setting, None where no flag was given.
Settings = _make_settings("Settings", EngineConfig, _GROUP)
ServerSettings = _make_settings("ServerSettings", ServerConfig, SERVER_GROUP)
#: The annotation of a command's parameter that takes all settings.
Flags = Annotated[Any, Parameter(name="*")]
NO_FLAGS = Settings()
NO_SERVER_FLAGS = ServerSettings()


def resolve_settings(settings: Any) -> Resolved:
    """The config that flags, environment and defaults give."""
    return resolve({} if settings is None else dataclasses.asdict(settings))


def resolve_server_settings(settings: Any) -> ResolvedServer:
    """The server's config, likewise."""
    return resolve_server({} if settings is None else dataclasses.asdict(settings))


def explain(resolved: Resolved | ResolvedServer) -> list[tuple[str, str, str]]:
    """Each setting, its value, and where that came from."""
    fields = dataclasses.fields(resolved.config)
    return [
        (field.name, _shown(field, getattr(resolved.config, field.name)), resolved.origins[field.name])
        for field in fields
    ]


def _shown(field: dataclasses.Field[Any], value: Any) -> str:
    if field.metadata.get("secret"):
        return f"({len(value)} given, not shown)" if value else ""
    return ", ".join(value) if isinstance(value, tuple) else str(value)
