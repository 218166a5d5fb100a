"""`octavo generate`: complete prompts, from the command line, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.sampling import SamplingFlags
from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.cli.terminal import console, escape
from octavo.errors import BackendError, InvalidRequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.llm import LLM

_SHOWN_OF_PROMPT = 60


def generate(
    *prompts: str,
    file: Annotated[Path | None, Parameter(help="Read prompts from a file, one a line.")] = None,
    json: Annotated[
        bool, Parameter(help="Print one JSON object a line, in the order of the prompts.")
    ] = False,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008  frozen
    settings: Flags = NO_FLAGS,
) -> None:
    """Complete prompts and print the completions.

    One prompt is streamed as it grows; several run together. Without prompts, standard input is one.
    """
    resolved = resolve_settings(settings)
    texts = _read_prompts(prompts, file)
    params = sampling.params()
    stderr = console()
    config = resolved.config

    from octavo.engine.llm import LLM

    with load(stderr, resolved, lambda: LLM.from_config(config), lambda llm: llm.info) as llm:
        if len(texts) == 1 and not json:
            _stream(llm, texts[0], params)
        else:
            _run_batch(llm, texts, params, stderr, json=json)


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    for output in llm.stream(prompt, params):
        print(output.delta, end="", flush=True)
        if output.error is not None:
            print(flush=True)
            raise BackendError(output.error)
    print(flush=True)


def _run_batch(llm: LLM, prompts: list[str], params: SamplingParams, stderr: Console, *, json: bool) -> None:
    import msgspec

    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if json:
            print(msgspec.json.encode({"prompt": prompt, **output.as_dict()}).decode())
            continue
        title = prompt[:_SHOWN_OF_PROMPT].replace("\n", " ")
        stderr.print(f"[bold green]──[/] {escape(title)}")
        print(output.text, flush=True)
        if output.error is not None:
            stderr.print(f"[red]{escape(output.error)}[/]")
    failed = sum(output.error is not None for output in outputs)
    if failed:
        raise BackendError(
            f"{failed} of {len(outputs)} prompts could not be completed; their errors are above"
        )


def _read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    texts = list(prompts)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"can't read prompts from {file}: {error}") from error
        if not texts:
            raise InvalidRequestError(f"nothing to complete: {file} has no line with text")
    elif not texts and not sys.stdin.isatty():
        try:
            texts = [sys.stdin.read()]
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"standard input is no UTF-8 text: {error}") from error
    if not texts or not all(texts):
        raise InvalidRequestError("nothing to complete: give a prompt, --file, or text on standard input")
    return texts
