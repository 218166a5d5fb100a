"""What several front ends of one engine tell each other of their requests, in files.

Whichever of them is asked for metrics adds up all, so that counters are those of the server. Rule: each
writes its own file, every PERIOD_SECONDS; one that was not written for a while is of a front end that died,
whose open requests failed with it and whose counts stay.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Self

import msgspec

from octavo.observability.histogram import HistogramCounts
from octavo.observability.stats import ServerStats
from octavo.request import FinishReason

PERIOD_SECONDS = 0.5
_DEAD_SECONDS = 5.0


class FrontStats(msgspec.Struct, frozen=True, kw_only=True):
    """A front end, or several together. gc_pauses: by generation. sizes: of internal containers."""

    server: ServerStats
    gc_pauses: list[HistogramCounts]
    loop_lag: HistogramCounts
    sizes: dict[str, int]

    def __add__(self, other: Self) -> Self:
        """Both together."""
        return msgspec.structs.replace(
            self,
            server=self.server + other.server,
            gc_pauses=[a + b for a, b in zip(self.gc_pauses, other.gc_pauses, strict=True)],
            loop_lag=self.loop_lag + other.loop_lag,
            sizes={name: size + other.sizes.get(name, 0) for name, size in self.sizes.items()},
        )

    def after_death(self) -> Self:
        """What is left of it: requests that were open have failed."""
        server = self.server
        ends = server.ends | {FinishReason.ERROR: server.ends[FinishReason.ERROR] + server.open}
        return msgspec.structs.replace(
            self, server=msgspec.structs.replace(server, open=0, ends=ends), sizes=_zeros(self.sizes)
        )


def _zeros(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict.fromkeys(sizes, 0)


class Peers:
    """The front ends beside this one. directory: theirs and the engine's. front: what this one is called."""

    def __init__(self, directory: Path, front: str) -> None:
        self._directory = directory
        self._path = directory / f"{front}.stats"

    def tell(self, own: FrontStats) -> None:
        """Write this front end's file, unless the server is being taken down."""
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.touch(mode=0o600)
            new.write_bytes(msgspec.msgpack.encode(own))
            os.replace(new, self._path)

    def together(self, own: FrontStats) -> FrontStats:
        """This front end and all others, those that died included."""
        paths = sorted(self._directory.glob("*.stats"))
        return reduce(lambda a, b: a + b, (_read(path) for path in paths if path != self._path), own)


def _read(path: Path) -> FrontStats:
    stats = msgspec.msgpack.decode(path.read_bytes(), type=FrontStats)
    dead = time.time() - path.stat().st_mtime > _DEAD_SECONDS
    return stats.after_death() if dead else stats
