"""A client of an engine in another process; see `supervisor`.

Outputs arrive in a thread, which only decodes and delivers them. Rule: a socket belongs to one thread: the
inbox to that one, the outbox to whoever holds the lock.
"""

from __future__ import annotations

import logging
import threading
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import zmq

from octavo.engine import stats_socket, wire
from octavo.errors import EngineDeadError
from octavo.messages import EngineRequest
from octavo.observability.stats import EngineStats

if TYPE_CHECKING:
    from octavo.engine.core_client import Deliver, OnDeath

logger = logging.getLogger(__name__)

_POLL_MS = 200


class Listener(Protocol):
    """Who is told of an engine's lives. Called in a thread of whoever tells."""

    def engine_ready(self, address: str) -> None:
        """An engine takes requests at `address`."""

    def engine_died(self, error: EngineDeadError) -> None:
        """Requests under way are lost."""


class Lives(Protocol):
    """An engine that is replaced when it dies."""

    @property
    def trouble(self) -> str | None:
        """Why no requests are served at the moment; None while they are."""

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of this engine and of those after it."""

    def close(self) -> None:
        """Nobody here needs it any more."""


class ProcessClient:
    """See core_client.Client. on_death is called for each engine that dies; the next one serves again.

    front: what this front end is called; drawn if empty.
    """

    def __init__(self, engine: Lives, deliver: Deliver, on_death: OnDeath, *, front: str = "") -> None:
        self._engine = engine
        self._deliver = deliver
        self._on_death = on_death
        self._front = front or uuid.uuid4().hex
        self._directory = TemporaryDirectory(prefix="octavo-")
        self._context = zmq.Context()
        path = Path(self._directory.name) / "front"
        self._own_address = wire.address_of(path)
        self._inbox = wire.bind(self._context, path)
        self._outbox: zmq.Socket[bytes] | None = None
        self._engine_address: str | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="octavo-outputs", daemon=True)
        self._thread.start()
        engine.listen(self)

    @property
    def trouble(self) -> str | None:
        """See Client."""
        return "the engine was closed" if self._closing else self._engine.trouble

    def add(self, request: EngineRequest) -> None:
        """See Client."""
        trouble = self.trouble
        if trouble is not None or not self._send(wire.Add(self._front, request)):
            raise EngineDeadError(trouble or "the engine has ended; it is being restarted")

    def abort(self, request_id: str) -> None:
        """See Client."""
        self._send(wire.Abort(request_id))

    def stats(self) -> EngineStats:
        """See Client."""
        address = self._engine_address
        if address is None:
            raise EngineDeadError(self.trouble or "the engine has ended; it is being restarted")
        return stats_socket.ask(address)

    def close(self) -> None:
        """See Client."""
        if self._closing:
            return
        self._closing = True
        self._send(wire.Goodbye(self._front))
        self._engine.close()
        self._thread.join()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    # -- called by the supervisor, in its thread ----------------------------------------------

    def engine_ready(self, address: str) -> None:
        """See Listener."""
        with self._lock:
            self._outbox, self._engine_address = wire.connect(self._context, address), address
        self._send(wire.Hello(self._front, self._own_address))

    def engine_died(self, error: EngineDeadError) -> None:
        """See Listener."""
        with self._lock:
            if self._outbox is not None:
                self._outbox.close()
            self._outbox = self._engine_address = None
        self._on_death(error)

    def _send(self, message: wire.ToEngine) -> bool:
        with self._lock:
            if self._outbox is None:
                return False
            self._outbox.send(wire.encode(message), zmq.NOBLOCK)
            return True

    def _receive(self) -> None:
        while not self._closing:
            if self._inbox.poll(_POLL_MS):
                self._deliver(wire.decode_outputs(self._inbox.recv()).outputs)
