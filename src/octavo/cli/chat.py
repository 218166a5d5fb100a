"""`octavo chat`: a conversation in the terminal, streamed, with a model loaded here or on a server."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.remote import RemoteServer, api_key, is_url
from octavo.cli.sampling import SamplingFlags
from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.cli.terminal import console, escape
from octavo.errors import ConfigError, InvalidRequestError, RemoteServerError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_HELP = "Type a message; /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class _Piece:
    """What an answer gained. The counts are of the answer so far; None: not known yet."""

    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    num_tokens: int | None = None
    error: str | None = None


#: Answers a conversation, piece by piece; closing the iterator ends the answer.
_Answerer = Callable[[Messages], Generator[_Piece]]


def chat(
    model: Annotated[
        str | None,
        Parameter(help="The model, as --model takes it, or the URL of an OpenAI-compatible server."),
    ] = None,
    /,
    *,
    system: Annotated[str | None, Parameter(help="A system message to begin with.")] = None,
    api_key: Annotated[str | None, Parameter(help="A server's key; else that in OPENAI_API_KEY.")] = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008  frozen
    settings: Flags = NO_FLAGS,
) -> None:
    """Talk to a model: loaded here, or served at a URL, under the name that --model gives or its only one.

    Answers stream; each turn reuses the KV cache of the turns before it.
    """
    sampling.params()  # refuses what can't be, before a model is loaded
    stderr = console()
    url, settings = _where(model, NO_FLAGS if settings is None else settings)
    if url is not None:
        _chat_remotely(stderr, url, settings, api_key, sampling, system)
    elif api_key is not None:
        raise ConfigError("--api-key is for a server, and the model is loaded here; leave it out")
    else:
        _chat_locally(stderr, settings, sampling, system)


def _where(model: str | None, settings: Any) -> tuple[str | None, Any]:
    """The server's URL, if the model is on one, and the settings without it."""
    named = settings.model
    if model is not None and named is not None and not is_url(model):
        raise ConfigError(f"the model is given twice, as {model[:100]!r} and as --model {named[:100]!r}")
    if model is None and named is not None and is_url(named):
        return named, dataclasses.replace(settings, model=None)
    if model is not None and is_url(model):
        return model, settings
    return None, settings if model is None else dataclasses.replace(settings, model=model)


def _chat_locally(stderr: Console, settings: Any, sampling: SamplingFlags, system: str | None) -> None:
    resolved = resolve_settings(settings)
    config = resolved.config

    from octavo.engine.llm import LLM

    with load(stderr, resolved, lambda: LLM.from_config(config), lambda llm: llm.info) as llm:
        _converse(stderr, lambda messages: _local_answer(llm, messages, sampling), system)


def _local_answer(llm: LLM, messages: Messages, sampling: SamplingFlags) -> Generator[_Piece]:
    for output in llm.stream(messages, sampling.params()):
        yield _Piece(
            output.delta, output.prompt_tokens, output.cached_tokens, output.num_tokens, output.error
        )


def _chat_remotely(
    stderr: Console,
    url: str,
    settings: Any,
    key: str | None,
    sampling: SamplingFlags,
    system: str | None,
) -> None:
    mistaken = [
        f"--{name.replace('_', '-')}"
        for name, value in dataclasses.asdict(settings).items()
        if value is not None and name != "model"
    ]
    if mistaken:
        raise ConfigError(f"{', '.join(mistaken)}: the model at {url[:200]} is loaded already; leave it out")
    server = RemoteServer(url, api_key(key))
    try:
        name = settings.model or server.model()
        stderr.print(f"[bold]{escape(name)}[/] at {escape(server.url)}")
        fields = {"model": name, "stream": True, "stream_options": {"include_usage": True}}
        fields |= sampling.openai_fields()
        _converse(stderr, lambda messages: _remote_answer(server, fields | {"messages": messages}), system)
    finally:
        server.close()


def _remote_answer(server: RemoteServer, body: dict[str, Any]) -> Generator[_Piece]:
    for chunk in server.chat(body):
        for choice in chunk.choices:
            if choice.delta is not None and choice.delta.content:
                yield _Piece(choice.delta.content)
        if chunk.usage is not None:
            usage = chunk.usage
            yield _Piece("", usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _converse(stderr: Console, answer: _Answerer, system: str | None) -> None:
    """Ask and answer until the user leaves."""
    stderr.print(f"[dim]{_HELP}[/]")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (text := _ask(stderr)) is not None:
        if text == "/clear":
            messages = list(opening)
        elif text:
            turn = {"role": "user", "content": text}
            reply = _show(stderr, answer([*messages, turn]))
            if reply:  # a turn without an answer is as if it had not been
                messages += [turn, {"role": "assistant", "content": reply}]


def _ask(stderr: Console) -> str | None:
    """The next line typed; None to leave."""
    try:
        text = stderr.input("[bold green]> [/]") if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        stderr.print()
        return None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is no UTF-8 text: {error}") from error
    return None if text.strip() == "/exit" else text.strip()


def _show(stderr: Console, pieces: Generator[_Piece]) -> str:
    """Stream an answer to standard output and its numbers to standard error; return its text."""
    started = time.perf_counter()
    first: float | None = None
    texts: list[str] = []
    last = _Piece()
    try:
        for piece in pieces:
            first = first or time.perf_counter() - started
            texts.append(piece.text)
            print(piece.text, end="", flush=True)
            last = piece
    except KeyboardInterrupt:
        pass  # the answer so far stays in the conversation
    except (InvalidRequestError, RemoteServerError) as error:
        if texts:
            print(flush=True)
        stderr.print(f"[red]{escape(str(error))}[/] [dim](/clear begins anew)[/]")
        return "".join(texts)
    finally:
        pieces.close()
    print(flush=True)
    if last.error is not None:
        stderr.print(f"[red]{escape(last.error)}[/]")
    if first is not None:
        stderr.print(f"[dim]{_numbers(last, len(texts), first, time.perf_counter() - started)}[/]")
    return "".join(texts)


def _numbers(last: _Piece, num_pieces: int, first: float, seconds: float) -> str:
    prompt = ""
    if last.prompt_tokens is not None:
        prompt = f"{last.prompt_tokens} prompt tokens ({last.cached_tokens} cached), "
    # A server tells the count at the end, which an answer that was stopped has not reached.
    count = num_pieces if last.num_tokens is None else last.num_tokens
    return f"{prompt}first token {first * 1e3:.0f} ms, {count} tokens at {count / seconds:.0f}/s"
