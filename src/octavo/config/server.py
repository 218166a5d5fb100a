"""Every setting of the server that the engine knows nothing of, once.

Made into flags, environment names and the reference page as those of `schema` are. Rule: a key is never
shown; its field says that it is a secret.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from octavo.config.schema import EngineConfig, setting
from octavo.errors import ConfigError


def _secret(help_: str) -> Any:
    """A list that neither repr nor --explain-config prints."""
    return dataclasses.field(default=(), repr=False, metadata={"help": help_, "secret": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Whom the server lets in, and how many. 0 means: decide from the engine and the machine."""

    max_waiting: int = setting(
        0, "Requests taken beyond max_num_seqs; more are refused with 429. 0: 4 times max_num_seqs."
    )
    max_connections: int = setting(
        0, "Most connections that a front end has open; 0: as many as open files allow, at most 4096."
    )
    drain_seconds: float = setting(20.0, "How long open answers have to end once the server is told to stop.")
    api_key: tuple[str, ...] = _secret("Keys, one of which each request must bring; repeat, or use commas.")
    api_key_file: str = setting("", "File with a key in each line; lines that begin with # don't count.")
    allowed_hosts: tuple[str, ...] = setting(
        (), "Names this server is called by, beside localhost and --host; repeat, or use commas. *: any."
    )

    def __post_init__(self) -> None:
        for name, high in (("max_waiting", 2**31), ("max_connections", 2**20), ("drain_seconds", 86400)):
            value = getattr(self, name)
            if not 0 <= value <= high:
                raise ConfigError(f"{name} is {value}; it must lie in 0..{high}")
        if any(not key for key in self.api_key):
            raise ConfigError("api_key is empty; give a key, or leave it out to let everyone in")

    def capacity(self, engine: EngineConfig) -> int:
        """Requests under way at once, running and waiting, that one of the front ends takes."""
        capacity = engine.max_num_seqs + (self.max_waiting or 4 * engine.max_num_seqs)
        return -(-capacity // engine.api_workers)
