"""Keeps an engine process running: starts it, watches it, starts it again.

One thread does all of it, since a child that asked to die with its parent dies with the thread that started
it. Rule: an engine that is gone, or has not run for UNRESPONSIVE_SECONDS, or has been in one step for
HUNG_SECONDS, is killed and replaced; one that fails again and again is given up.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import zmq

from octavo import errors
from octavo.config.schema import EngineConfig
from octavo.engine import wire
from octavo.engine.engine_state import EngineState
from octavo.engine.model_info import ModelInfo
from octavo.engine.process_client import Listener, ProcessClient
from octavo.engine.pulse import PULSE_FILE, Pulse
from octavo.errors import EngineDeadError, OctavoError
from octavo.weights.sources import resolve_model

if TYPE_CHECKING:
    from octavo.engine.core_client import Client, Deliver, OnDeath
    from octavo.input.input_processor import InputProcessor
    from octavo.output.output_processor import OutputProcessor

logger = logging.getLogger(__name__)

#: A process that has not run for so long is not healthy; several of its beats are missing.
QUIET_SECONDS = 1.5
#: One that has not run for so long is killed.
UNRESPONSIVE_SECONDS = 10.0
#: So is one that has been in a single step for so long.
HUNG_SECONDS = 300.0
_POLL_SECONDS = 0.1
_GOODBYE_MS = 500
_STOP_SECONDS = 5.0
#: Restarts wait 0.5 s, 1 s, 2 s .. up to this; an engine that served this long starts the count anew.
_LONGEST_BACKOFF = 30.0
_MOST_RESTARTS = 6


@dataclass(slots=True)
class _Child:
    """One life of the engine."""

    process: subprocess.Popen[bytes]
    directory: Path
    pulse: Pulse
    pipe: int  # what it says of itself comes here
    started: float

    def report(self, seconds: float) -> wire.ToSupervisor | None:
        """What it said, if it does within so many seconds; also what it said before it died."""
        if not select.select([self.pipe], [], [], seconds)[0]:
            return None
        said = os.read(self.pipe, 1 << 20)
        return wire.decode_to_supervisor(said) if said else None

    def end(self) -> None:
        """Kill it, whatever it does, and leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.pipe)
        shutil.rmtree(self.directory, ignore_errors=True)


class EngineProcess:
    """An engine in a process of its own, and the text side of it in this one.

    `start` loads the model and returns when it can serve. inputs, outputs, info: as of `build.Engine`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.info: ModelInfo
        self.inputs: InputProcessor
        self.outputs: OutputProcessor
        self._config = config
        self._child: _Child | None = None
        self._address: str | None = None  # of the engine that serves now
        self._trouble: str | None = "the engine is starting"
        self._listener: Listener | None = None
        self._lock = threading.Lock()  # of listener and address
        self._closing = threading.Event()
        self._settled = threading.Event()  # the first start has succeeded or failed
        self._start_error: BaseException | None = None
        self._life = 0
        self.num_restarts = 0
        self._directory = Path(tempfile.mkdtemp(prefix="octavo-", dir=_short_folder()))
        #: Where other processes read what becomes of the engine: an EngineState.
        self.state_path = self._directory / "state"
        self._thread = threading.Thread(target=self._run, name="octavo-supervisor", daemon=True)

    @classmethod
    def start(cls, config: EngineConfig, *, meanwhile: Callable[[], None] = lambda: None) -> Self:
        """Start an engine and wait until it is ready. Raises what loading the model raises.

        meanwhile: what the caller has to do while the engine loads.
        """
        path = resolve_model(config.model, config.cache_path, progress=True, offline=config.offline)
        engine = cls(config)
        engine._thread.start()
        try:
            # Not before: the engine loads while these are imported.
            from octavo.engine.text import Text
            from octavo.output.output_processor import OutputProcessor

            meanwhile()
            text = Text.read(config, path)
            engine._settled.wait()
            if engine._start_error is not None:
                raise engine._start_error
            sizes = engine.info.max_model_len, engine.info.vocab_size
            engine.inputs = text.inputs(max_model_len=sizes[0], vocab_size=sizes[1])
        except BaseException:
            engine.close()
            raise
        engine.outputs = OutputProcessor(text.tokenizer)
        return engine

    def connect(self, deliver: Deliver, on_death: OnDeath) -> Client:
        """A client of the engine, and of those that replace it. Whoever has it owns the engine."""
        return ProcessClient(self, deliver, on_death)

    @property
    def trouble(self) -> str | None:
        """Why no requests are served at the moment; None while they are."""
        child = self._child
        if self._trouble is not None or child is None:
            return self._trouble or "the engine is starting"
        if child.process.poll() is not None:
            return f"the engine has ended ({_how(child.process)}); it is being restarted"
        return trouble_of(child.pulse)

    @property
    def pid(self) -> int | None:
        """The process that serves now."""
        return None if self._child is None else self._child.process.pid

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of this engine and of those after it."""
        with self._lock:
            self._listener = listener
            if self._address is not None:
                listener.engine_ready(self._address)

    def forget(self, front: str) -> None:
        """End the requests of a front end that is gone."""
        with self._lock:
            if self._address is not None:
                context = zmq.Context()
                outbox = wire.connect(context, self._address)
                outbox.setsockopt(zmq.LINGER, _GOODBYE_MS)
                outbox.send(wire.encode(wire.Goodbye(front)))
                outbox.close()
                context.term()

    def close(self) -> None:
        """End the engine and stop watching."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- the supervisor's thread --------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            error = self._one_life()
            child, self._child, self._address = self._child, None, None
            served = 0.0
            if child is not None:
                served = time.monotonic() - child.started
                child.end()
            if self._closing.is_set():
                break
            if not self._settled.is_set():  # it never served
                self._start_error = error
                self._settled.set()
                break
            failures = 1 if served > _LONGEST_BACKOFF else failures + 1
            self._announce_death(error, failures)
            if failures > _MOST_RESTARTS or self._closing.wait(_backoff(failures)):
                break
            self.num_restarts += 1
        self._trouble = self._trouble or "the engine was closed"

    def _one_life(self) -> BaseException:
        """Start an engine and watch it until it ends; why it ended."""
        try:
            self._child = child = self._spawn()
        except OSError as error:
            return EngineDeadError(f"the engine process can't be started: {error}")
        while (report := child.report(_POLL_SECONDS)) is None and child.process.poll() is None:
            if self._closing.is_set():
                return EngineDeadError("the engine was closed")
        if not isinstance(report, wire.Ready):
            return _error_of(child, report or child.report(0))
        self._announce_ready(report)
        while not self._closing.wait(_POLL_SECONDS):
            if child.process.poll() is not None:
                return _error_of(child, child.report(0))
            if child.pulse.age > UNRESPONSIVE_SECONDS:
                return EngineDeadError(f"the engine did not run for {child.pulse.age:.0f} s and was killed")
            if child.pulse.step_seconds > HUNG_SECONDS:
                return EngineDeadError(f"the engine hung in a step for {HUNG_SECONDS:.0f} s and was killed")
        return EngineDeadError("the engine was closed")

    def _spawn(self) -> _Child:
        directory = Path(tempfile.mkdtemp(prefix="octavo-", dir=_short_folder()))
        pulse = Pulse.create(directory / PULSE_FILE)
        read, write = os.pipe()
        try:
            command = [sys.executable, "-m", "octavo.engine", str(directory), str(write)]
            # A session of its own: Ctrl-C in the terminal is the front end's to answer.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=(write,), start_new_session=True
            )
        finally:
            os.close(write)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        process.stdin.flush()
        return _Child(process, directory, pulse, read, time.monotonic())

    def _announce_ready(self, ready: wire.Ready) -> None:
        if not self._settled.is_set():
            self.info = ready.info
        with self._lock:
            self._address = ready.address
            if self._listener is not None:
                self._listener.engine_ready(ready.address)
            self._trouble = None  # from now on requests come
            self._publish()
        self._settled.set()

    def _announce_death(self, error: BaseException, failures: int) -> None:
        if failures > _MOST_RESTARTS:
            self._trouble = f"{error}; it failed {failures} times in a row and is not restarted again"
        else:
            self._trouble = f"{error}; it is being restarted"
        logger.critical("%s", self._trouble)
        self._publish()
        with self._lock:
            if self._listener is not None:
                self._listener.engine_died(EngineDeadError(self._trouble))

    def _publish(self) -> None:
        child = self._child
        pulse = None if child is None else str(child.directory / PULSE_FILE)
        self._life += self._address is not None
        EngineState(self._life, self._address, pulse, self._trouble, self.info).write(self.state_path)


def trouble_of(pulse: Pulse) -> str | None:
    """What an engine's pulse says is wrong with it, if anything."""
    if pulse.age > QUIET_SECONDS:
        return f"the engine has not run for {pulse.age:.1f} s"
    if pulse.step_seconds > HUNG_SECONDS:
        return f"the engine has been in one step for {pulse.step_seconds:.0f} s"
    return None


def _backoff(failures: int) -> float:
    return 0.0 if failures <= 1 else min(_LONGEST_BACKOFF, 0.5 * 2.0 ** (failures - 2))


def _error_of(child: _Child, report: wire.ToSupervisor | None) -> BaseException:
    """Why a child ended: the exception it reported, whole, or how the process went."""
    child.process.wait(_STOP_SECONDS)
    if not isinstance(report, wire.Failed):
        return EngineDeadError(f"the engine process ended: {_how(child.process)}")
    kind = getattr(errors, report.kind, None)
    if isinstance(kind, type) and issubclass(kind, OctavoError):
        error: BaseException = kind(report.message)
    else:
        error = EngineDeadError(f"the engine stopped: {report.kind}: {report.message}")
    error.add_note(f"In the engine process:\n{report.trace}")
    return error


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _short_folder() -> str | None:
    """Where sockets may lie: their paths have at most 107 bytes."""
    return None if len(tempfile.gettempdir()) < 60 else "/tmp"
