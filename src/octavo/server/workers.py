"""Several front-end processes before one engine: `--api-workers`.

All of them accept on one socket. Rule: this process serves nothing itself; it keeps the workers running,
tells them to stop, and tells the engine of those that died.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config.schema import EngineConfig
from octavo.config.server import ServerConfig
from octavo.engine.supervisor import EngineProcess
from octavo.errors import EngineDeadError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_RESTART_SECONDS = 1.0
_START_SECONDS = 60.0


class WorkerSettings(msgspec.Struct, frozen=True):
    """What a worker is told: one line of JSON on its standard input, which stays open as long as we live."""

    config: EngineConfig
    server: ServerConfig
    host: str
    state: str
    front: str
    listener: int


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    front: str
    ready: threading.Event


class Workers:
    """The front ends of an engine. Used in one thread."""

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        config: EngineConfig,
        server: ServerConfig,
        engine: EngineProcess,
    ) -> None:
        self._listener = listener
        self._host = host
        self._config = config
        self._server = server
        self._engine = engine
        self._workers: list[_Worker] = []
        self._signals = 0

    def run(self, *, on_ready: Callable[[], None], on_drain: Callable[[float], None]) -> None:
        """Serve until SIGINT or SIGTERM. A second one ends open answers at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        self._listener.listen()
        try:
            self._workers = [self._start() for _ in range(self._config.api_workers)]
            self._wait_until_ready()
            on_ready()
            while not self._signals:
                time.sleep(_POLL_SECONDS)
                self._replace_dead()
            on_drain(self._server.drain_seconds)
            self._wait_for_end()
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.wait()
            self._engine.close()

    def _stop(self, *_: Any) -> None:
        self._signals += 1

    def _start(self) -> _Worker:
        front = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.server.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._listener.fileno(),),
            start_new_session=True,  # Ctrl-C reaches them through us
        )
        settings = WorkerSettings(
            config=self._config,
            server=self._server,
            host=self._host,
            state=str(self._engine.state_path),
            front=front,
            listener=self._listener.fileno(),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        worker = _Worker(process, front, threading.Event())
        threading.Thread(target=_hear_ready, args=(worker,), daemon=True).start()
        return worker

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not all(worker.ready.is_set() for worker in self._workers):
            for worker in self._workers:
                if worker.process.poll() is not None or time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"a front end did not start (exit code {worker.process.returncode}); what it said is "
                        "above. Start with --api-workers 1 to see more"
                    )
            time.sleep(_POLL_SECONDS)

    def _replace_dead(self) -> None:
        for i, worker in enumerate(self._workers):
            if worker.process.poll() is None:
                continue
            logger.critical("a front end ended (exit code %s); another one starts", worker.process.returncode)
            self._engine.forget(worker.front)
            time.sleep(_RESTART_SECONDS)
            self._workers[i] = self._start()

    def _wait_for_end(self) -> None:
        passed_on = 0
        while any(worker.process.poll() is None for worker in self._workers):
            if passed_on < self._signals:
                passed_on += 1
                for worker in self._workers:
                    worker.process.send_signal(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)


def _hear_ready(worker: _Worker) -> None:
    assert worker.process.stdout is not None
    if worker.process.stdout.readline():
        worker.ready.set()


def read_settings() -> WorkerSettings:
    """In a worker: what it was told."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
