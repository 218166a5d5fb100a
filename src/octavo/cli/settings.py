"""The engine's settings as command-line flags, made from the schema."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, get_type_hints

from cyclopts import Group, Parameter

from octavo.config.resolve import Resolved, resolve
from octavo.config.schema import EngineConfig

_GROUP = Group("Engine", help="Each can also be set in the environment, as OCTAVO_<NAME>.", sort_key=1)


def _flag(field: dataclasses.Field[Any], kind: Any) -> tuple[str, Any, Any]:
    default = "on" if field.default is True else field.default
    shown = f" [default: {default}]" if default != "" else ""
    help_ = field.metadata["help"] + shown
    flag = Annotated[kind | None, Parameter(help=help_, show_default=False, group=_GROUP)]
    return field.name, flag, dataclasses.field(default=None)


def _make_settings() -> type:
    kinds = get_type_hints(EngineConfig)
    flags = [_flag(field, kinds[field.name]) for field in dataclasses.fields(EngineConfig)]
    made = dataclasses.make_dataclass("Settings", flags, kw_only=True, frozen=True)
    made.__module__ = __name__  # where cyclopts looks up the annotations
    return made


#: A dataclass with a field for each setting, None where no flag was given.
Settings = _make_settings()
#: The annotation of a command's parameter that takes all settings.
Flags = Annotated[Any, Parameter(name="*")]
NO_FLAGS = Settings()


def resolve_settings(settings: Any) -> Resolved:
    """The config that flags, environment and defaults give."""
    return resolve({} if settings is None else dataclasses.asdict(settings))


def explain(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Each setting, its value, and where that came from."""
    config = dataclasses.asdict(resolved.config)
    return [(name, str(config[name]), origin) for name, origin in resolved.origins.items()]
