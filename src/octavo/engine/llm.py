"""An engine in the caller's thread, for scripts and notebooks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.config.resolve import resolve
from octavo.config.schema import EngineConfig
from octavo.engine.build import ModelInfo, build_engine
from octavo.engine.core_client import InProcessClient
from octavo.errors import InvalidRequestError
from octavo.messages import EngineRequest
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded, to be called from one thread.

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
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of {"role": ..., "content": ...}; see `generate`."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        batch: Any = [conversations] if single else conversations
        requests = [
            self._inputs.process_chat(messages, p, request_id=next(self._ids), arrival=time.monotonic())
            for messages, p in zip(batch, _each(params, len(batch)), strict=True)
        ]
        return self._run_all(requests, progress=progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Yield a prompt's or a conversation's output as it grows; closing the iterator aborts it."""
        params = params or SamplingParams()
        request_id, arrival = next(self._ids), time.monotonic()
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            request = self._inputs.process_chat(messages, params, request_id=request_id, arrival=arrival)
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
        """Step until all requests ended, yielding every output; abort what is left if the caller goes."""
        pending: set[str] = set()
        try:
            for request in requests:
                self._client.add(request)
                pending.add(request.request_id)
                self._outputs.add(request)
            while self._client.has_requests:
                for output in self._outputs.process(self._client.step()):
                    if output.finished:
                        pending.discard(output.request_id)
                    yield output
        finally:
            for request_id in pending:
                self._client.abort(request_id)
                self._outputs.abort(request_id)

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


def _progress_bar(*, enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
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
