"""An engine in the caller's thread, for scripts and notebooks."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.core_client import InProcessClient
from octavo.engine.model_info import ModelInfo
from octavo.errors import InvalidRequestError
from octavo.input.input_processor import ChatArguments
from octavo.messages import EngineRequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded, to be called from one thread. Several streams may be open at once.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=20))[0].text

    settings: the fields of EngineConfig, by name. Usable as a context manager; `close` frees the model.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._build(resolve({"model": model, **settings}).config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An LLM for a config that is resolved already."""
        llm = cls.__new__(cls)
        llm._build(config)
        return llm

    def _build(self, config: EngineConfig) -> None:
        engine = build_engine(config)
        self.info: ModelInfo = engine.info
        self._client = InProcessClient(engine.core)
        self._inputs = engine.inputs
        self._outputs = engine.outputs
        self._ids = (f"request-{i}" for i in itertools.count())
        #: Where the outputs of each request under way go: one deque for all requests of a call.
        self._inboxes: dict[str, deque[RequestOutput]] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, given as text or token ids; outputs in the order of the prompts.

        params: one for all, or one for each. InvalidRequestError before anything runs if a prompt can't
        be served; an output whose finish_reason is "error" carries its cause.
        """
        batch = _as_batch(prompts)
        requests = [
            self._inputs.process(prompt, p, request_id=next(self._ids), arrival=time.monotonic())
            for prompt, p in zip(batch, _each(params, len(batch)), strict=True)
        ]
        return self._run_all(requests, progress=progress)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **chat: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of {"role": ..., "content": ...}; see `generate`.

        chat: tools and other arguments of the model's chat template, for all conversations; see
        `ChatTemplate.render`.
        """
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        batch: Any = [conversations] if single else conversations
        requests = [
            self._inputs.process_chat(
                messages, p, request_id=next(self._ids), arrival=time.monotonic(), **chat
            )
            for messages, p in zip(batch, _each(params, len(batch)), strict=True)
        ]
        return self._run_all(requests, progress=progress)

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        **chat: Unpack[ChatArguments],
    ) -> Generator[RequestOutput]:
        """Yield a prompt's or a conversation's output as it grows; closing the iterator aborts it.

        chat: as for `chat`, for a conversation only.
        """
        params = params or SamplingParams()
        request_id, arrival = next(self._ids), time.monotonic()
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            request = self._inputs.process_chat(
                messages, params, request_id=request_id, arrival=arrival, **chat
            )
        elif chat:
            raise InvalidRequestError(
                f"{', '.join(chat)}: this is for conversations, and the prompt is none; leave it out"
            )
        else:
            text: Any = prompt
            request = self._inputs.process(text, params, request_id=request_id, arrival=arrival)
        yield from self._run([request])

    def close(self) -> None:
        """Free the model."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, requests: list[EngineRequest]) -> Generator[RequestOutput]:
        """Step until these requests ended, yielding their outputs; abort what is left if the caller goes."""
        inbox: deque[RequestOutput] = deque()
        pending = {request.request_id for request in requests}
        try:
            with _ctrl_c_held_back():
                for request in requests:
                    self._inboxes[request.request_id] = inbox
                    self._outputs.add(request)
                    self._client.add(request)
            while pending:
                if not inbox:
                    self._step()
                    continue
                output = inbox.popleft()
                if output.finished:
                    pending.discard(output.request_id)
                yield output
        finally:
            with _ctrl_c_held_back():
                for request_id in pending:
                    self._client.abort(request_id)
                    self._outputs.abort(request_id)
                for request in requests:
                    self._inboxes.pop(request.request_id, None)

    def _step(self) -> None:
        """Run one step. Its outputs may be those of another stream that is open."""
        with _ctrl_c_held_back():
            processed = self._outputs.process(self._client.step())
            for request_id in processed.stopped:
                self._client.abort(request_id)
            for output in processed.outputs:
                self._inboxes[output.request_id].append(output)

    def _run_all(self, requests: list[EngineRequest], *, progress: bool) -> list[RequestOutput]:
        ended: dict[str, RequestOutput] = {}
        tokens = 0
        with _progress_bar(enabled=progress and len(requests) > 0) as bar:
            task = bar.add_task("Generating", total=len(requests), speed="")
            started = time.perf_counter()
            for output in self._run(requests):
                tokens += len(output.new_token_ids)
                if output.finished:
                    ended[output.request_id] = output
                speed = tokens / max(time.perf_counter() - started, 1e-9)
                bar.update(task, completed=len(ended), speed=f"{speed:.0f} tokens/s")
        return [ended[request.request_id] for request in requests]


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Let Ctrl-C wait for the block to end: a step cut in two leaves scheduler and runner at odds."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or (previous := signal.getsignal(signal.SIGINT)) is None:
        yield  # Python code is not interrupted here
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


def _progress_bar(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),  # standard output is the caller's
        transient=True,
        disable=not enabled,
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt, as ids
    return list(prompts)  # type: ignore[arg-type]


def _each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} SamplingParams were given for {count} prompts")
    return list(params)
