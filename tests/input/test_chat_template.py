"""Renders conversations. Oracle: transformers' apply_chat_template with the same template."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from octavo.errors import CheckpointError, InvalidRequestError
from octavo.input import chat_template
from octavo.input.chat_template import ChatTemplate
from octavo.weights.gguf import GGUFFile

USER = {"role": "user", "content": "Où est le chat? <b>&</b>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Là.", "name": None},
    {"role": "user", "content": "  And now?\n"},
]
TOOL_CONVERSATION = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "find", "arguments": {"what": "café", "n": [1]}}}
        ],
    },
    {"role": "tool", "content": "found", "tool_call_id": "1"},
]

#: In the manner of the families around: each leans on other parts of the dialect.
TEMPLATES = {
    "turns with bos and eos": """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
[Q] {{ message['content'] | trim }} [/Q]
    {%- elif message['role'] == 'assistant' %}
 {{ message.content }}{{ eos_token }}
    {%- endif %}
{%- endfor %}""",
    "namespace and slices": """\
{% set ns = namespace(system='', count=0) %}
{% if messages[0].role == 'system' %}
    {% set ns.system = messages[0].content %}
    {% set messages = messages[1:] %}
{% endif %}
<sys>{{ ns.system }}</sys>
{% for m in messages %}
    {% set ns.count = ns.count + 1 %}
{{ loop.index0 % 2 }}:{{ '%s' | format(m.role) }}:{{ m['content'] if m.content is defined else '-' }}
{% endfor %}
{{ ns.count }}{% if add_generation_prompt %}<bot>{% endif %}
""",
    "tools are none": "{% if tools is not none %}TOOLS{% endif %}{{ documents is none }}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "items": """\
{% for m in messages %}{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}
{% endfor %}""",
    "loop controls": """\
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m.role }}{% break %}{% endfor %}""",
    "macro": """\
{% macro turn(role, text) %}
<{{ role }}>{{ text }}
{% endmacro %}
{% for m in messages %}{{ turn(m.role, (m.content or '') * 2) }}{% endfor %}
{{ turn(role='a', text=2 ** 3) }}""",
    "generation tag": """\
{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{% set inner = 'x' %}
{{ m.content }}{{ inner }}
{% endgeneration %}{{ inner }}{% endif %}
{% endfor %}""",
    "call block": """\
{% macro wrap() %}[{{ caller() }}]{% endmacro %}
{% for m in messages %}{% call wrap() %}{{ m.role }}{% endcall %}{% endfor %}""",
    "strftime": "{{ strftime_now('%Y') }} {{ messages | length }}",
    "undefined": "{{ nothing }}|{{ messages[0].nothing }}|{{ messages | map(attribute='role') | join(',') }}",
}


def transformers_renders(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
        )
        return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs))


def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("messages", [[USER], CONVERSATION, TOOL_CONVERSATION], ids=["one", "turns", "tools"])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_renders_as_transformers_does(source: str, messages: list[dict[str, Any]]) -> None:
    for prompt in (True, False):
        expected = transformers_renders(source, messages, add_generation_prompt=prompt)
        assert compile_template(source).render(messages, add_generation_prompt=prompt) == expected


def test_renders_smollm2s_template_as_transformers_does(smollm2_gguf: GGUFFile) -> None:
    source = smollm2_gguf.metadata["tokenizer.chat_template"]
    for messages in ([USER], CONVERSATION):
        text = compile_template(source).render(messages)
        assert text == transformers_renders(source, messages, add_generation_prompt=True)
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_kwargs_are_names_in_the_template() -> None:
    template = compile_template("{{ enable_thinking }} {{ bos_token }}")
    assert template.render([USER], chat_template_kwargs={"enable_thinking": False}) == "False <s>"
    kwargs = {"self": 1, "template": 2, "name": 3}  # names of Python's or ours, and of nothing in templates
    assert compile_template("{{ template }}{{ name }}").render([USER], chat_template_kwargs=kwargs) == "23"


RESERVED = [
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "bos_token", "eos_token", "raise_exception", "strftime_now",
]  # fmt: skip


@pytest.mark.parametrize("name", RESERVED)
def test_kwargs_replace_nothing_that_has_its_own_place(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"chat_template_kwargs has '{name}'") as raised:
        compile_template("").render([USER], chat_template_kwargs={"fine": 1, name: "mine"})
    assert raised.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        ({"tools": {"name": "find"}}, "tools"),
        ({"tools": ["find"]}, "tools"),
        ({"documents": "all"}, "documents"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{param} must be") as raised:
        compile_template("").render([USER], **arguments)
    assert raised.value.param == param


def test_a_generation_prompt_comes_unless_the_last_message_is_gone_on_with() -> None:
    template = compile_template("{{ messages[0].content }}{{ add_generation_prompt }}")
    assert template.render([USER]).endswith("True")
    assert template.render([USER], add_generation_prompt=False).endswith("False")
    assert template.render([USER], continue_final_message=True) == USER["content"]
    with pytest.raises(InvalidRequestError, match="ask for one of them"):
        template.render([USER], add_generation_prompt=True, continue_final_message=True)


CONTINUED = {
    "kept": "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}",
    "reversed": "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}",
}


@pytest.mark.parametrize("words", ["It is", "It is ", " It\n", "is"])
@pytest.mark.parametrize("source", CONTINUED.values(), ids=CONTINUED.keys())
def test_the_text_ends_in_the_last_message_to_go_on_with_it(source: str, words: str) -> None:
    messages = [USER, {"role": "assistant", "content": words}]
    text = compile_template(source).render(messages, continue_final_message=True)
    assert text == transformers_renders(source, messages, continue_final_message=True)
    assert text.rstrip().endswith(words.strip())


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER, {"role": "assistant", "tool_calls": []}], "last message must have content"),
        ([], "last message must have content"),
        ([USER, {"role": "assistant", "content": "left out"}], "leaves out the last message"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(messages: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        compile_template("{{ messages[0].role }}").render(messages, continue_final_message=True)


NAMED = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "{{ documents[0].title }}"}


def test_a_template_is_chosen_by_name_or_by_the_tools_there_are() -> None:
    template = ChatTemplate(NAMED, bos_token="<s>", eos_token="</s>")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"type": "function"}]) == "1 tools"
    assert template.render([USER], tools=[{}], template="default") == "plain"
    assert template.render([USER], documents=[{"title": "T"}], template="rag") == "T"
    only = compile_template("{% if tools %}{{ tools[0].name }}{% endif %}")
    assert only.render([USER], tools=[{"name": "find"}]) == "find"


def test_a_template_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidRequestError, match="no chat template named 'other'; it has 'default'"
    ) as raised:
        compile_template("").render([USER], template="other")
    assert raised.value.param == "chat_template"
    with pytest.raises(InvalidRequestError, match="no chat template named 'default'; it has 'rag'"):
        ChatTemplate({"rag": ""}, bos_token="", eos_token="").render([USER])
    with pytest.raises(CheckpointError, match="chat template 'rag' can't be compiled"):
        ChatTemplate({"default": "", "rag": "{% for %}"}, bos_token="", eos_token="")


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = compile_template("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    assert template.render([{"role": "user", "content": []}]) == ""


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {}}, "image_url"),
        ({"type": "text"}, "text"),
        ("words", "str"),
        (None, "None"),
    ],
)
def test_other_parts_are_refused_by_type(part: object, kind: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"messages\[1\].content has a part of type '{kind}"
    ) as raised:
        compile_template("").render([USER, {"role": "user", "content": [part]}])
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "has no attribute 'missing'"),
        ("{{ 'text' + 1 }}", "concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__.x }}", "unsafe"),
        ("{% include 'etc' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 10 ** 9 }}", "repetition would hold 1000000000"),
        ("{{ 10 ** 999999999 }}", "exponent is"),
        ("{{ range(10 ** 9) }}", "too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 4194304 characters"),
    ],
)
def test_what_a_template_raises_is_the_requests_error(source: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        compile_template(source).render([USER])
    assert raised.value.param == "messages"
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages recursive %}{% for c in messages %}"
        "{% endfor %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.05 s"):
        compile_template(source).render([USER] * 1000)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% if x %}",
        "{{ x | no_such_filter }}",
        "{% generation %}",
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
        "{{" + "(" * 9000 + "1" + ")" * 9000 + "}}",
    ],
)
def test_a_template_that_does_not_compile_is_the_checkpoints_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template can't be compiled"):
        compile_template(source)
