"""Asking an engine process for its numbers, whatever it is doing.

A thread of that process answers on a socket beside the engine's own. Rule: the thread only asks the core,
which says what it knows also in the middle of a step; so a hung engine can still say since when it hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from octavo.engine import wire
from octavo.errors import EngineDeadError
from octavo.observability.stats import EngineStats

_ANSWER_MS = 2000
_SUFFIX = "-stats"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(EngineStats).decode


def answer(path: Path, stats: Callable[[], EngineStats]) -> None:
    """Answer from now on, for as long as this process runs. path: of the engine's own socket."""
    socket = wire.bind(zmq.Context(), path.with_name(path.name + _SUFFIX), kind=zmq.REP)

    def serve() -> None:
        while True:
            socket.recv()
            socket.send(_encode(stats()))

    threading.Thread(target=serve, name="octavo-stats", daemon=True).start()


def ask(address: str) -> EngineStats:
    """The numbers of the engine that takes requests at `address`. EngineDeadError if none come soon."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address + _SUFFIX)
        socket.send(b"")
        if not socket.poll(_ANSWER_MS):
            raise EngineDeadError(f"the engine does not say how it is, within {_ANSWER_MS / 1e3:g} s")
        return _decode(socket.recv())
