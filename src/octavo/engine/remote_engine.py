"""The engine of another process's supervisor, as a front end beside it sees it.

A thread follows the supervisor's state file, so that deaths and restarts are heard of here as they are there.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from octavo.config.schema import EngineConfig
from octavo.engine.core_client import Client, Deliver, OnDeath
from octavo.engine.engine_state import EngineState
from octavo.engine.model_info import ModelInfo
from octavo.engine.process_client import Listener, ProcessClient
from octavo.engine.pulse import Pulse
from octavo.engine.supervisor import trouble_of
from octavo.engine.text import Text
from octavo.errors import EngineDeadError
from octavo.input.input_processor import InputProcessor
from octavo.output.output_processor import OutputProcessor
from octavo.weights.sources import resolve_model

_POLL_SECONDS = 0.1
_SUPERVISOR_GONE = "the engine's supervisor has ended; restart the server"


class RemoteEngine:
    """A `LoadedEngine` that somebody else keeps running. front: what this front end is called."""

    def __init__(self, config: EngineConfig, state_path: Path, front: str) -> None:
        state = EngineState.read(state_path)
        assert state.info is not None, "the engine is ready before its front ends start"
        self.info: ModelInfo = state.info
        self.inputs: InputProcessor
        self.outputs: OutputProcessor
        self._config = config
        self._path = state_path
        self._front = front
        self._state = state
        self._pulse: Pulse | None = None
        self._listener: Listener | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="octavo-follow", daemon=True)

    @classmethod
    def start(cls, config: EngineConfig, state_path: Path, front: str) -> Self:
        """Read the model's tokenizer. The engine must be ready."""
        engine = cls(config, state_path, front)
        path = resolve_model(config.model, config.cache_path, progress=False, offline=config.offline)
        text = Text.read(config, path)
        sizes = engine.info.max_model_len, engine.info.vocab_size
        engine.inputs = text.inputs(max_model_len=sizes[0], vocab_size=sizes[1])
        engine.outputs = OutputProcessor(text.tokenizer)
        return engine

    def connect(self, deliver: Deliver, on_death: OnDeath) -> Client:
        """A client of the engine, and of those that replace it."""
        return ProcessClient(self, deliver, on_death, front=self._front)

    @property
    def trouble(self) -> str | None:
        """Why no requests are served at the moment; None while they are."""
        if self._state.trouble is not None:
            return self._state.trouble
        return "the engine is starting" if self._pulse is None else trouble_of(self._pulse)

    def listen(self, listener: Listener) -> None:
        """Tell `listener` of this engine and of those after it."""
        self._listener = listener
        self._take(self._state)
        self._thread.start()

    def close(self) -> None:
        """Stop following; the engine goes on."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            try:
                state = EngineState.read(self._path)
            except OSError:
                state = EngineState(self._state.life, None, None, _SUPERVISOR_GONE, self.info)
            if state != self._state:
                self._hear(state)

    def _hear(self, state: EngineState) -> None:
        served = self._state.address is not None
        if served and (state.life != self._state.life or state.address is None):
            cause = state.trouble or "the engine has ended; another one serves now"
            self._state = EngineState(state.life, None, None, cause, self.info)
            assert self._listener is not None
            self._listener.engine_died(EngineDeadError(cause))
        self._take(state)

    def _take(self, state: EngineState) -> None:
        if state.address is not None and state.pulse is not None:
            assert self._listener is not None
            self._pulse = Pulse(Path(state.pulse))
            self._listener.engine_ready(state.address)
        self._state = state  # from now on requests come
