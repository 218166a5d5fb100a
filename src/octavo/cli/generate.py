"""`octavo generate`: complete prompts, from the command line, a file, or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from octavo.cli.loading import load
from octavo.cli.sampling import SamplingFlags
from octavo.cli.settings import NO_FLAGS, Flags, resolve_settings
from octavo.errors import InvalidRequestError


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
    import msgspec

    from octavo.engine.llm import LLM

    resolved = resolve_settings(settings)
    texts = _read_prompts(prompts, file)
    console = Console(stderr=True)
    params = sampling.params()
    config = resolved.config
    with load(console, resolved, lambda: LLM.from_config(config), lambda llm: llm.info) as llm:
        if len(texts) == 1 and not json:
            for output in llm.stream(texts[0], params):
                print(output.delta, end="", flush=True)
            print()
            return
        for prompt, output in zip(texts, llm.generate(texts, params), strict=True):
            if json:
                print(msgspec.json.encode({"prompt": prompt, **msgspec.structs.asdict(output)}).decode())
            else:
                console.rule(prompt[:60].replace("\n", " "), align="left")
                print(output.text)


def _read_prompts(prompts: tuple[str, ...], file: Path | None) -> list[str]:
    texts = list(prompts)
    if file is not None:
        try:
            texts += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"can't read prompts from {file}: {error}") from error
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    if not texts or not all(texts):
        raise InvalidRequestError("nothing to complete: give a prompt, --file, or text on standard input")
    return texts
