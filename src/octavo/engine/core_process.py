"""An engine core in a process of its own: what the supervisor starts.

    python -m octavo.engine DIRECTORY PIPE

The config comes as one line of JSON on standard input, which then stays open for as long as the parent
lives. Rule: this process ends when the parent is gone, however that ended, and before it ends by itself it
says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from collections import defaultdict
from pathlib import Path

import msgspec
import zmq

from octavo.config.schema import EngineConfig
from octavo.engine import stats_socket, wire
from octavo.engine.build import build_core
from octavo.engine.core import EngineCore
from octavo.engine.core_client import add_or_refuse
from octavo.engine.pulse import PULSE_FILE, Pulse
from octavo.messages import EngineOutput
from octavo.observability.runtime import GCWatch, settle_garbage_collector

logger = logging.getLogger(__name__)

_IDLE_MS = 1000  # how long to wait for a message when there is nothing to step
_PR_SET_PDEATHSIG = 1
_EXIT_FAILED = 70  # EX_SOFTWARE
_SOCKET = "engine"


class FrontEnds:
    """The sockets of the front ends, and whose request is whose."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        path = directory / _SOCKET
        self.address = wire.address_of(path)
        self._inbox = wire.bind(self._context, path)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._owners: dict[str, str] = {}

    def take(self, core: EngineCore, *, wait: bool) -> None:
        """Apply all messages that are there; wait: for the first of them, a while."""
        if wait and not self._inbox.poll(_IDLE_MS):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                self._apply(core, wire.decode_to_engine(self._inbox.recv(zmq.NOBLOCK)))

    def send(self, outputs: list[EngineOutput]) -> None:
        """Each front end its own, together."""
        by_front: dict[str, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            front = self._owners.get(output.request_id)
            if front is not None:
                by_front[front].append(output)
            if output.finish_reason is not None:
                self._owners.pop(output.request_id, None)
        for front, own in by_front.items():
            if front in self._sockets:
                self._sockets[front].send(wire.encode(wire.Outputs(own)), zmq.NOBLOCK)

    def _apply(self, core: EngineCore, message: wire.ToEngine) -> None:
        match message:
            case wire.Add(front, request):
                self._owners[request.request_id] = front
                output = add_or_refuse(core, request)
            case wire.Abort(request_id):
                output = core.abort(request_id)
            case wire.Hello(front, address):
                self._sockets[front] = wire.connect(self._context, address)
                return
            case wire.Goodbye(front):
                self._forget(core, front)
                return
        if output is not None:
            self.send([output])

    def _forget(self, core: EngineCore, front: str) -> None:
        for request_id in [name for name, owner in self._owners.items() if owner == front]:
            core.abort(request_id)
            del self._owners[request_id]
        socket = self._sockets.pop(front, None)
        if socket is not None:
            socket.close()


def serve(core: EngineCore, fronts: FrontEnds, pulse: Pulse) -> None:
    """Step as long as there are requests, and wait for them otherwise; for ever."""
    while True:
        fronts.take(core, wait=not core.has_requests)
        if core.has_requests:
            pulse.begin_step()
            outputs = core.step()
            pulse.end_step()
            fronts.send(outputs)


def main() -> None:
    """Load the model, say so, and serve."""
    directory, pipe = Path(sys.argv[1]), int(sys.argv[2])
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    _die_with_parent(directory)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        pulse = Pulse(directory / PULSE_FILE)
        pulse.start_beating()
        core, info = build_core(config)
        fronts = FrontEnds(directory)
        pauses = GCWatch()
        stats_socket.answer(
            directory / _SOCKET,
            lambda: msgspec.structs.replace(core.stats(), gc_pauses=pauses.snapshot()),
        )
        os.write(pipe, wire.encode(wire.Ready(info, fronts.address)))
        gc.enable()  # __main__ turned it off
        settle_garbage_collector()  # now, while the front end gets ready
        serve(core, fronts, pulse)
    except BaseException as error:
        failed = wire.Failed(type(error).__name__, str(error), traceback.format_exc())
        os.write(pipe, wire.encode(failed))
        os._exit(_EXIT_FAILED)  # threads of libraries may never end


def _die_with_parent(directory: Path) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass  # nothing more is said; the end of it is what matters
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait_for_end, name="octavo-parent", daemon=True).start()
