"""By which names the server may be called.

Rule: a page of another site can make its own name resolve to this machine (DNS rebinding) and so read what
the browser lets only the same site read. Its requests carry that name in Host, so other names than ours are
refused. An address in Host can't be rebound; still only ours are taken, as far as we know them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/@\[\]]+))(?::\d{0,5})?")
_ANY = "*"


def host_name(header: bytes) -> str | None:
    """The name or address in a Host header (RFC 9110, 7.2), in lower case; None if it is malformed."""
    match = _HOST.fullmatch(header.decode("latin-1"))
    if match is None:
        return None
    return (match[1] or match[2]).lower().removesuffix(".") or None


class Hosts:
    """The names of one server. bound: what it listens on, as --host says. allowed: others; "*" is any."""

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        names = {name.lower().strip("[]").removesuffix(".") for name in allowed}
        self._any = _ANY in names
        self._names = names | {"localhost", bound.lower()}
        address = _address(bound)
        self._any_address = address is not None and address.is_unspecified

    def accepts(self, name: str) -> bool:
        """Whether this server goes by that name."""
        if self._any or name in self._names:
            return True
        address = _address(name)
        return address is not None and (address.is_loopback or self._any_address)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
