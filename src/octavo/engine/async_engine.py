"""An engine behind an event loop: many callers, one model.

The core steps in a process of its own, or in a thread; each step's outputs cross into the loop once,
together. Rule: streams belong to this class, text to the OutputProcessor, both live in the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, Unpack

from octavo.config.schema import EngineConfig
from octavo.engine.core_client import Client, Deliver, OnDeath
from octavo.engine.inbox import Inbox
from octavo.engine.model_info import ModelInfo
from octavo.engine.parallel_sampling import in_parallel
from octavo.engine.request_log import RequestLog
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.input.input_processor import ChatArguments, InputProcessor
from octavo.messages import EngineOutput, EngineRequest
from octavo.observability.stats import EngineStats
from octavo.output.output_processor import OutputProcessor
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduler.policy import Policy


class LoadedEngine(Protocol):
    """A loaded model that can be connected to: `build.Engine` or `supervisor.EngineProcess`."""

    info: ModelInfo
    inputs: InputProcessor
    outputs: OutputProcessor

    def connect(self, deliver: Deliver, on_death: OnDeath) -> Client:
        """Start to serve; outputs and deaths come in a thread of the client."""


class AsyncEngine:
    """A loaded model, for the event loop it is made in. `AsyncEngine.start` loads one.

    The engine may die and be replaced by another: streams under way end with EngineDeadError then.
    """

    def __init__(self, engine: LoadedEngine) -> None:
        self.info = engine.info
        self._inputs = engine.inputs
        self._outputs = engine.outputs
        self._loop = asyncio.get_running_loop()
        #: What becomes of each request.
        self.requests = RequestLog(engine.info.name)
        self._streams: dict[str, Inbox] = {}
        name = secrets.token_hex(4)  # others may talk to the same core
        self._ids = (f"request-{name}-{i}" for i in itertools.count())
        self._client = engine.connect(self._deliver_from_thread, self._die_from_thread)

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Load the model in a process of its own and start serving."""
        from octavo.engine.supervisor import EngineProcess  # starts processes: only where one is wanted

        return cls(await asyncio.to_thread(EngineProcess.start, config))

    @property
    def trouble(self) -> str | None:
        """Why no requests are served at the moment; None while they are."""
        return self._client.trouble

    @property
    def num_streams(self) -> int:
        """Requests under way."""
        return len(self._streams)

    @property
    def inputs(self) -> InputProcessor:
        """The text side: its tokenizer, and how prompts become ids."""
        return self._inputs

    def stats(self) -> EngineStats:
        """The core at this moment; may block, so ask from another thread than the loop's."""
        return self._client.stats()

    def sizes(self) -> dict[str, int]:
        """Entries of internal containers of this side: all 0 when idle."""
        return {
            "streams": len(self._streams),
            "output_streams": len(self._outputs),
            "request_log": len(self.requests),
        }

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a completion. What is wrong with the request, or an engine that has stopped, raises here,
        before the stream begins.

        n: how many completions; each output's `index` says of which it is. priority: smaller goes first;
        refused unless the engine's policy is priority. cache_salt: only requests of the same share KV blocks.
        """
        process = self._inputs.process
        return self._begin(
            partial(process, prompt, params, priority=priority, cache_salt=cache_salt), n, priority
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        **chat: Unpack[ChatArguments],
    ) -> AsyncGenerator[RequestOutput]:
        """Stream the answer to a conversation; see `generate`.

        chat: arguments of the model's chat template; see `ChatTemplate.render`.
        """
        process = self._inputs.process_chat
        return self._begin(
            partial(process, messages, params, priority=priority, cache_salt=cache_salt, **chat), n, priority
        )

    def _begin(
        self, process: Callable[..., EngineRequest], n: int, priority: int
    ) -> AsyncGenerator[RequestOutput]:
        """The stream of n answers to the request that `process` makes, given its id and arrival."""
        with self.requests.admitting() as arrival:
            self._check_serving()
            self._check_priority(priority)
            return in_parallel(process(request_id=next(self._ids), arrival=arrival), n, self._take)

    async def close(self) -> None:
        """Stop the engine after the step it is in; open streams end with EngineDeadError."""
        await asyncio.to_thread(self._client.close)
        self._die("the engine was closed")

    def _check_serving(self) -> None:
        if (trouble := self._client.trouble) is not None:
            raise EngineDeadError(trouble)

    def _check_priority(self, priority: int) -> None:
        if priority and self.info.policy is not Policy.PRIORITY:
            raise InvalidRequestError(
                f"priority is {priority}, but this engine serves first come, first served; leave it out, or "
                "start with --policy priority",
                param="priority",
            )

    def _take(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        return self._stream(self.requests.took(request))

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request. Leaving the iterator aborts it."""
        inbox = Inbox()
        self._outputs.add(request)
        self._streams[request.request_id] = inbox
        self.requests.begin(request)
        finished = False
        try:
            self._client.add(request)
            while not finished:
                output = await inbox.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                self.requests.advance(output)
                yield output
        except EngineDeadError as error:
            self.requests.fail(request.request_id, error)
            raise
        finally:
            self._streams.pop(request.request_id, None)
            self._outputs.abort(request.request_id)
            if not finished:
                self._client.abort(request.request_id)
            self.requests.end(request.request_id, final_coming=self._client.trouble is None)

    def _deliver_from_thread(self, outputs: list[EngineOutput]) -> None:
        self._call_in_loop(self._deliver, outputs)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        self.requests.deliver(outputs)
        processed = self._outputs.process(outputs)
        for request_id in processed.stopped:
            self._client.abort(request_id)
        for output in processed.outputs:
            inbox = self._streams.get(output.request_id)
            if inbox is not None:
                inbox.put(output)

    def _die_from_thread(self, error: BaseException) -> None:
        self._call_in_loop(self._die, _cause(error))

    def _call_in_loop(self, function: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The program left its loop without closing the engine: nobody is listening any more.

    def _die(self, cause: str) -> None:
        self.requests.flush()
        for inbox in self._streams.values():
            inbox.put(EngineDeadError(cause))


def _cause(error: BaseException) -> str:
    """Why the engine died, in a sentence."""
    if isinstance(error, EngineDeadError):
        return str(error)
    return f"the engine stopped: {type(error).__name__}: {error}"
