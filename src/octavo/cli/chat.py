"""`octavo chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.sampling import SamplingFlags
from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.cli.terminal import console, escape
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_HELP = "Type a message; /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    *,
    system: Annotated[str | None, Parameter(help="A system message to begin with.")] = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008  frozen
    settings: Flags = NO_FLAGS,
) -> None:
    """Talk to a model. Answers stream; each turn reuses the KV cache of the turns before it."""
    resolved = resolve_settings(settings)
    sampling.params()  # refuses what can't be, before a model is loaded
    stderr = console()
    config = resolved.config

    from octavo.engine.llm import LLM

    with load(stderr, resolved, lambda: LLM.from_config(config), lambda llm: llm.info) as llm:
        stderr.print(f"[dim]{_HELP}[/]")
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        while (text := _ask(stderr)) is not None:
            if text == "/clear":
                messages = list(opening)
            elif text:
                turn = {"role": "user", "content": text}
                answer = _answer(stderr, llm, [*messages, turn], sampling)
                if answer:  # a turn without an answer is as if it had not been
                    messages += [turn, {"role": "assistant", "content": answer}]


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


def _answer(stderr: Console, llm: LLM, messages: list[dict[str, str]], sampling: SamplingFlags) -> str:
    """Stream an answer to standard output and its numbers to standard error; return its text."""
    started = time.perf_counter()
    first = None
    output: RequestOutput | None = None
    stream = llm.stream(messages, sampling.params())
    try:
        for output in stream:
            first = first or time.perf_counter() - started
            print(output.delta, end="", flush=True)
    except KeyboardInterrupt:
        pass  # the answer so far stays in the conversation
    except InvalidRequestError as error:
        stderr.print(f"[red]{escape(str(error))}[/] [dim](/clear begins anew)[/]")
        return ""
    finally:
        stream.close()
    print(flush=True)
    if output is None:
        return ""
    if output.error is not None:
        stderr.print(f"[red]{escape(output.error)}[/]")
    seconds = time.perf_counter() - started
    count = output.num_tokens
    stderr.print(
        f"[dim]{output.prompt_tokens} prompt tokens ({output.cached_tokens} cached), first token "
        f"{(first or 0) * 1e3:.0f} ms, {count} tokens at {count / seconds:.0f}/s[/]"
    )
    return output.text
