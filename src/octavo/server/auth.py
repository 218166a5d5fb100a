"""Who may ask: API keys.

Rule: once there is a key, every route wants one but those of PUBLIC, which are compared with the path as it
came: what looks like one of them and is not spelled like it is not public. Keys are compared by their
digests, each of them whatever the others gave, so that time says nothing about a key; none is logged.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from octavo.errors import ConfigError

#: What those who restart the server and balance its load ask. /metrics and /version are not here: a proxy on
#: this machine makes everybody's address loopback, so that an address proves nothing.
PUBLIC = frozenset({"/health", "/ready"})

_BEARER = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([^\s]+)\s*")
_KEY = re.compile(r"[\x21-\x7e]{1,4096}")


class Keys:
    """The keys that are accepted; none at all lets everyone in."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def let_in(self, path: str, authorization: bytes | None) -> bool:
        """Whether a request for `path` with this Authorization header may pass."""
        if not self._digests or path in PUBLIC:
            return True
        given = _BEARER.fullmatch(authorization or b"")
        digest = sha256(given[1] if given else b"").digest()
        known = False
        for each in self._digests:
            known |= hmac.compare_digest(each, digest)
        return known and given is not None


def load_keys(keys: Iterable[str], file: str) -> Keys:
    """The keys given as settings and those of a file. ConfigError where there are none in it, or bad ones."""
    found = [(key, "--api-key") for key in keys]
    if file:
        lines = [line.strip() for line in _read(file).splitlines()]
        in_file = [(line, file) for line in lines if line and not line.startswith("#")]
        if not in_file:
            raise ConfigError(f"{file} has no keys; write one in each line, or leave --api-key-file out")
        found += in_file
    for number, (key, origin) in enumerate(found, start=1):
        if not _KEY.fullmatch(key):  # the key itself is not shown
            raise ConfigError(
                f"key {number}, from {origin}, can't be sent in a header: it must have 1..4096 printable "
                "ASCII characters and no spaces"
            )
    return Keys(key for key, _ in found)


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read keys from {file}: {error}") from error
