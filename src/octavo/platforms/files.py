"""How many files and sockets this process may have open.

Rule: the only module that asks the operating system about that.
"""

from __future__ import annotations

import resource


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit to `wanted`, or as near to it as allowed; the limit then in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # some systems have a lower bound of their own
        return soft
    return allowed
