"""What an engine process and its front ends say to each other.

    front end --Hello, Add, Abort, Goodbye-->  engine      over the engine's socket
    engine    --Outputs-->                     front end   over the socket that its Hello names
    engine    --Ready or Failed-->             supervisor  over a pipe

Rule: msgpack of the structs below and nothing else; a front end's requests end when it says Goodbye. Sockets
are ZMQ's over ipc, in a directory and files of their owner alone, without high-water marks: what is sent is
not dropped while both sides live.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from octavo.engine.model_info import ModelInfo
from octavo.messages import EngineOutput, EngineRequest

_OWNER_ONLY = 0o600
_SCHEME = "ipc://"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end is there; its outputs go to `address`."""

    front: str
    address: str


class Add(msgspec.Struct, frozen=True, tag=True):
    """A request of a front end."""

    front: str
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request early."""

    request_id: str


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front end is gone."""

    front: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What a step added to a front end's requests."""

    outputs: list[EngineOutput]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests are taken at `address`."""

    info: ModelInfo
    address: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, or stopped: an exception's class, message and traceback."""

    kind: str
    message: str
    trace: str


ToEngine = Hello | Add | Abort | Goodbye
ToSupervisor = Ready | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_outputs = msgspec.msgpack.Decoder(Outputs).decode
decode_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor).decode


def bind(context: zmq.Context[zmq.Socket[bytes]], path: Path, *, kind: int = zmq.PULL) -> zmq.Socket[bytes]:
    """A socket to receive on, at `path`."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(address_of(path))
    path.chmod(_OWNER_ONLY)
    return socket


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket to send on. What nobody has taken when it closes is dropped."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return socket


def address_of(path: Path) -> str:
    """The ZMQ address of a socket file."""
    return f"{_SCHEME}{path}"
