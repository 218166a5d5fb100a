"""Renders a conversation into the text a model was trained on, with the model's own template.

Rule: a template is a stranger's program. It runs in Jinja's immutable sandbox, within limits of time
and output, and whatever it raises is an error of the request; a template that does not compile is an
error of the checkpoint.

The names a template may use are those that Hugging Face's chat templates expect: messages, tools,
documents, add_generation_prompt, bos_token, eos_token, raise_exception, strftime_now, the tojson
filter, `break` and `continue`, and the `generation` tag.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import CheckpointError, InvalidRequestError

MAX_OUTPUT_CHARACTERS = 4 << 20
MAX_SECONDS = 2.0
_MAX_EXPONENT = 64
_QUOTED_CHARACTERS = 300


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        """Compile the template. Raises CheckpointError where it can't be compiled."""
        self.source = source
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"the model's chat template can't be compiled: {error.message} (line {error.lineno}). Give "
                "another template, or use completions, which need none"
            ) from error
        except Exception as error:  # RecursionError, or Python's own SyntaxError for deep nesting
            raise CheckpointError(
                f"the model's chat template can't be compiled: {_quote(error)}. Give another template, or use "
                "completions, which need none"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as text.

        messages: dicts with role and content. Keys whose value is None are left out, since templates
        tell a missing key from a null one badly; content that is a list of text parts becomes one
        string, the parts joined by newlines. kwargs: further names for the template.
        Raises InvalidRequestError, also with what the template itself has to say against the messages.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        names["messages"] = [_plain_message(message) for message in messages]
        names["add_generation_prompt"] = add_generation_prompt
        _Environment.deadline = time.monotonic() + MAX_SECONDS
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                size += len(piece)
        except Exception as error:
            _refuse(_quote(error), error)
        return "".join(pieces)


def _placeholder() -> Callable[[], None]:
    raise NotImplementedError
