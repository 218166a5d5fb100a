"""`octavo chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.sampling import SamplingFlags
from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.errors import InvalidRequestError

_HELP = "Type a message; /clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    *,
    system: Annotated[str | None, Parameter(help="A system message to begin with.")] = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008  frozen
    settings: Flags = NO_FLAGS,
) -> None:
    """Talk to a model. Answers stream; each turn reuses the KV cache of the turns before it."""
    from octavo.engine.llm import LLM

    resolved = resolve_settings(settings)
    console = Console(stderr=True, highlight=False)
    config = resolved.config
    with load(console, resolved, lambda: LLM.from_config(config), lambda llm: llm.info) as llm:
        console.print(f"[dim]{_HELP}[/]")
        opening = [{"role": "system", "content": system}] if system else []
        messages = list(opening)
        while (text := _ask(console)) is not None:
            if text == "/clear":
                messages = list(opening)
            elif text:
                messages.append({"role": "user", "content": text})
                answer = _answer(console, llm, messages, sampling)
                messages.append({"role": "assistant", "content": answer})


def _ask(console: Console) -> str | None:
    """The next line typed; None to leave."""
    try:
        text = console.input("[bold green]> [/]") if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text.strip() == "/exit" else text.strip()


def _answer(console: Console, llm: object, messages: list[dict[str, str]], sampling: SamplingFlags) -> str:
    """Stream an answer to standard output and its numbers to standard error; return its text."""
    from octavo.engine.llm import LLM

    assert isinstance(llm, LLM)
    started = time.perf_counter()
    first = None
    output = None
    stream = llm.stream(messages, sampling.params())
    try:
        for output in stream:
            first = first or time.perf_counter() - started
            print(output.delta, end="", flush=True)
    except KeyboardInterrupt:
        pass  # the answer so far stays in the conversation
    except InvalidRequestError as error:
        console.print(f"[red]{error}[/] [dim](/clear begins anew)[/]")
        messages.pop()
        return ""
    finally:
        stream.close()
    print(flush=True)
    if output is None:
        return ""
    seconds = time.perf_counter() - started
    count = len(output.token_ids)
    console.print(
        f"[dim]{output.prompt_tokens} prompt tokens ({output.cached_tokens} cached), first token "
        f"{(first or 0) * 1e3:.0f} ms, {count} tokens at {count / seconds:.0f}/s[/]"
    )
    return output.text
