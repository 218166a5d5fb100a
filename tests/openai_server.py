"""A scripted OpenAI-compatible server, for tests of clients: it answers as a test says, to the millisecond.

async def answer(body: dict, reply: Reply) -> None:
    await reply.stream("a", "b")

with scripted_server(answer) as server:
    httpx.post(server.url + "/v1/chat/completions", ...)
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


class Reply:
    """Writes an answer. sent: when each chunk with text went out (perf_counter)."""

    def __init__(self, writer: asyncio.StreamWriter, path: str) -> None:
        self.sent: list[float] = []
        self.status = 0
        self._writer = writer
        self._chat = "chat" in path

    async def head(self, status: int = 200, **headers: str) -> None:
        """The status line and headers of a chunked body."""
        self.status = status
        lines = [f"HTTP/1.1 {status} Status", "Transfer-Encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def raw(self, data: bytes) -> None:
        """Any bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def body(self, data: bytes) -> None:
        """A piece of the body."""
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, value: Any) -> None:
        """An event of a stream."""
        await self.body(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def text(self, text: str, reason: str | None = None) -> None:
        """A chunk with text."""
        content = {"delta": {"content": text}} if self._chat else {"text": text}
        self.sent.append(time.perf_counter())
        await self.event({"choices": [{"index": 0, **content, "finish_reason": reason}], "usage": None})

    async def usage(self, prompt: int, completion: int) -> None:
        """The chunk that ends a stream with the number of tokens."""
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        await self.event({"choices": [], "usage": usage})

    async def done(self) -> None:
        """The end of a stream and of the body."""
        await self.body(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def stream(self, *texts: str, delays: list[float] | None = None, tokens: int | None = None) -> None:
        """A whole answer. delays: seconds before each text. tokens: what usage says there were."""
        await self.head(Content_Type="text/event-stream")
        for index, text in enumerate(texts):
            await asyncio.sleep(delays[index] if delays else 0)
            await self.text(text)
        await self.usage(7, len(texts) if tokens is None else tokens)
        await self.done()

    async def json(self, value: Any, status: int = 200, **headers: str) -> None:
        """A whole answer that is JSON."""
        await self.head(status, **headers)
        await self.body(json.dumps(value).encode())
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        """Hang up."""
        self._writer.transport.abort()


Script = Callable[[Any, Reply], Awaitable[None]]


@dataclass
class ScriptedServer:
    """Where it listens, and what happened."""

    url: str
    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def scripted_server(script: Script, *, model: str = "scripted") -> Iterator[ScriptedServer]:
    """Serve until the block ends, in a thread. GET answers with the model's name, POST as scripted."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = _Serving(script, model)
    try:
        made = asyncio.run_coroutine_threadsafe(serving.start(), loop)
        yield made.result(10)
    finally:
        asyncio.run_coroutine_threadsafe(serving.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Serving:
    def __init__(self, script: Script, model: str) -> None:
        self._script = script
        self._model = model
        self._open = self._connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> ScriptedServer:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._state = ScriptedServer(f"http://127.0.0.1:{port}")
        return self._state

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        try:
            while not writer.is_closing() and (head := await reader.readuntil(b"\r\n\r\n")):
                request = await _read(head, reader, connection)
                self._state.requests.append(request)
                reply = Reply(writer, request.path)
                if request.method == "GET":
                    await reply.json({"data": [{"id": self._model}]})
                    continue
                self._state.replies.append(reply)
                self._open += 1
                self._state.most_at_once = max(self._state.most_at_once, self._open)
                try:
                    await self._script(request.body, reply)
                finally:
                    self._open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()


async def _read(head: bytes, reader: asyncio.StreamReader, connection: int) -> Request:
    first, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Request(method, path, headers, json.loads(body) if body else None, connection)
