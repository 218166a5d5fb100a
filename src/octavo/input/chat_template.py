"""Renders a conversation into the text a model was trained on, with the model's own template.

Rule: a template is a stranger's program. It runs in Jinja's immutable sandbox, within limits of time
and output, and whatever it raises is an error of the request; a template that does not compile is an
error of the checkpoint. (The limits stop a template that runs away. They do not keep a hostile one
from taking memory, so a server takes templates from its operator, never from requests.)

The names a template may use are those that Hugging Face's chat templates expect: messages, tools,
documents, add_generation_prompt, bos_token, eos_token, raise_exception, strftime_now, the tojson
filter, `break` and `continue`, and the `generation` tag.

A model may have several templates, each with a name: "tool_use" is taken where there are tools,
"default" otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import CheckpointError, ConfigError, InvalidRequestError

MAX_OUTPUT_CHARACTERS = 4 << 20
MAX_SECONDS = 2.0
_MAX_EXPONENT = 64
_QUOTED_CHARACTERS = 300
#: Marks where the last message ends in the rendered text. The space at its end tells whether the
#: template trims messages. Private-use characters, which no template means anything by.
_END_MARK = "\ue0c7\ue0de\ue0c7 "

#: Names of a template's that its own arguments give, or that `render` takes under another name.
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
    }
)

#: When the render running in this context has to be done, by time.monotonic.
_deadline: ContextVar[float] = ContextVar("chat template deadline")


class ChatTemplate:
    """A model's compiled chat templates. Rendering changes nothing, so threads may share one."""

    def __init__(self, source: str | Mapping[str, str], *, bos_token: str, eos_token: str) -> None:
        """Compile the template, or the templates by name, of which there is at least one.

        Raises CheckpointError where one can't be compiled.
        """
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._templates = {name: _compile(name, text) for name, text in self.sources.items()}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        messages: dicts with role and content. Keys whose value is None are left out, since templates
        test for a missing key and stumble over a null one; content that is a list of text parts
        becomes one string, the parts joined by newlines. tools, documents: as the model's template
        takes them. template: one by name. continue_final_message: the text ends where the last
        message does, so that the model goes on with it. add_generation_prompt: the text ends where an
        answer begins; so it does if not given, unless it ends in the last message. chat_template_kwargs:
        further names for the template; those that it does not read have no effect, as in transformers.
        Raises InvalidRequestError, also for what the template itself has against the messages.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt begins a new message, continue_final_message goes on with the last "
                "one; ask for one of them",
                param="add_generation_prompt",
            )
        names: dict[str, Any] = {**self._special_tokens, **_checked_kwargs(chat_template_kwargs)}
        names["tools"] = _checked_objects("tools", tools)
        names["documents"] = _checked_objects("documents", documents)
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(plain)
        names["messages"] = plain
        names["add_generation_prompt"] = add_generation_prompt
        text = _run(self._choose(template, tools), names)
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, name: str | None, tools: object) -> jinja2.Template:
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequestError(
                f"the model has no chat template named {name[:_QUOTED_CHARACTERS]!r}; it has "
                f"{', '.join(map(repr, self._templates))}",
                param="chat_template",
            )
        return self._templates[name]


def read_template(path: str) -> str:
    """The source in a file; ConfigError where it is none."""
    try:
        source = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read --chat-template {path}: {error}") from error
    if not source.strip():
        raise ConfigError(f"--chat-template {path} is empty; leave it out for the model's own template")
    return source


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    param = "chat_template_kwargs"
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequestError(f"{param} must be an object of names and values", param=param)
    if reserved := sorted(_RESERVED & kwargs.keys()):
        raise InvalidRequestError(
            f"{param} has {', '.join(map(repr, reserved))}, which would take the place of what the request "
            "or the model gives the template; leave it out",
            param=param,
        )
    return kwargs


def _checked_objects(
    param: str, objects: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]] | None:
    if objects is None:
        return None
    if not isinstance(objects, list | tuple) or not all(isinstance(item, Mapping) for item in objects):
        raise InvalidRequestError(f"{param} must be a list of objects", param=param)
    return objects


def _run(template: jinja2.Template, names: Mapping[str, Any]) -> str:
    """Render within the limits of time and output."""
    pieces: list[str] = []
    size = 0
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        for piece in template.generate(names):
            _tick()
            pieces.append(piece)
            size += len(piece)
            if size > MAX_OUTPUT_CHARACTERS:
                raise _refusal(f"the conversation renders to more than {MAX_OUTPUT_CHARACTERS} characters")
    except InvalidRequestError:
        raise
    except Exception as error:
        raise _refusal(f"the model's chat template does not take these messages: {_quote(error)}") from error
    finally:
        _deadline.reset(token)
    return "".join(pieces)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark after the last message's text."""
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise _refusal("there is no text to go on with: the last message must have content")
    messages[-1]["content"] += _END_MARK


def _cut_at_mark(text: str) -> str:
    """What comes before the mark; without the spaces before it where the template trims messages."""
    before, mark, after = text.rpartition(_END_MARK.rstrip())
    if not mark:
        raise _refusal("the model's chat template leaves out the last message, so it can't be gone on with")
    return before if after.startswith(" ") else before.rstrip()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a guard on the two operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not isinstance(right, int | float) or abs(right) > _MAX_EXPONENT:
                raise jinja2.TemplateRuntimeError(
                    f"an exponent is {right!r}; at most {_MAX_EXPONENT} is allowed"
                )
        elif (size := _repeated_size(left, right)) > MAX_OUTPUT_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"a repetition would hold {size} items")
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def tick() -> str:
        """What every loop and macro of a template calls first."""
        _tick()
        return ""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training: only text here."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        return _compile_source(source)
    except Exception as error:  # beside TemplateSyntaxError: RecursionError, Python's SyntaxError
        which = "" if name == "default" else f" {name[:_QUOTED_CHARACTERS]!r}"
        raise CheckpointError(
            f"the model's chat template{which} can't be compiled: {_quote(error)}. Give another template, or "
            "use completions, which need none"
        ) from error


def _compile_source(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    tree = environment.parse(source)
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=block.lineno)
        block.body.insert(0, nodes.ExprStmt(call, lineno=block.lineno))
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


def _tick() -> None:
    if time.monotonic() > _deadline.get():
        raise _refusal(
            f"the model's chat template took more than {MAX_SECONDS:g} s; shorten the conversation"
        )


def _repeated_size(left: Any, right: Any) -> int:
    """How long `left * right` gets where one of them is a sequence; 0 for numbers."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            return len(sequence) * count
    return 0


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "\n".join(_text_of_part(index, part) for part in plain["content"])
    return plain


def _text_of_part(index: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise _refusal(
        f"messages[{index}].content has a part of type {str(kind)[:_QUOTED_CHARACTERS]!r}; this model takes "
        'text parts only: {"type": "text", "text": "..."}'
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _quote(error: Exception) -> str:
    text = str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return text[:_QUOTED_CHARACTERS] + (f" (line {line})" if line else "")


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="messages")
