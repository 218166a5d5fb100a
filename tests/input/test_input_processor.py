"""Completes and refuses requests, with SmolLM2's tokenizer and template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.input.chat_template import ChatTemplate
from octavo.input.input_processor import ChatArguments, InputProcessor
from octavo.input.tokenizer import Tokenizer
from octavo.messages import EngineRequest
from octavo.sampling_params import SamplingParams
from octavo.weights.gguf import GGUFFile

CONTEXT = 100
VOCAB = 49160  # eight rows of padding
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def processor(smollm2_gguf: GGUFFile, smollm2_tokenizer: Tokenizer) -> InputProcessor:
    template = ChatTemplate(
        smollm2_gguf.metadata["tokenizer.chat_template"], bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    return InputProcessor(smollm2_tokenizer, template, max_model_len=CONTEXT, vocab_size=VOCAB)


def process(processor: InputProcessor, prompt: Any, clamp: bool = False, **params: Any) -> EngineRequest:
    return processor.process(prompt, SamplingParams(**params), request_id="r", arrival=1.5, clamp=clamp)


def chat(
    processor: InputProcessor, messages: Any, arguments: ChatArguments | None = None, **params: Any
) -> EngineRequest:
    return processor.process_chat(
        messages, SamplingParams(**params), request_id="r", arrival=1.5, **(arguments or {})
    )


def test_a_text_prompt_is_tokenised_and_completed(processor: InputProcessor) -> None:
    request = processor.process(
        "Hello world", SamplingParams(top_k=5), request_id="abc", priority=3, arrival=2.0
    )
    assert request.prompt_ids == processor.tokenizer.encode("Hello world")
    assert (request.request_id, request.priority, request.arrival) == ("abc", 3, 2.0)
    assert request.eos_ids == (2, 0)
    assert request.params.top_k == 5
    assert request.params.max_tokens == CONTEXT - len(request.prompt_ids)
    assert request.output_ids == []


def test_ids_are_taken_as_they_are(processor: InputProcessor) -> None:
    assert process(processor, [5, 0, 49159]).prompt_ids == [5, 0, 49159]
    assert process(processor, (7, 8)).prompt_ids == [7, 8]


def test_a_missing_seed_is_drawn_and_a_given_one_kept(processor: InputProcessor) -> None:
    seeds = {process(processor, [1]).params.seed for _ in range(5)}
    assert len(seeds) == 5
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert process(processor, [1], seed=0).params.seed == 0


def test_ignore_eos_leaves_no_eos(processor: InputProcessor) -> None:
    assert process(processor, [1], ignore_eos=True).eos_ids == ()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "no tokens"),
        ([], "no tokens"),
        ([1, 2.0, "x"], r"prompt\[1\] is 2\.0, a float"),
        ([True], r"prompt\[0\] is True, a bool"),
        ([1, "a"], r"prompt\[1\] is 'a', a str"),
        ([[1, 2]], r"prompt\[0\] is \[1, 2\], a list"),
        ([1, -1, -2], rf"prompt\[1\] is -1, but the model's tokens are 0\.\.{VOCAB - 1}"),
        ([VOCAB], rf"prompt\[0\] is {VOCAB}"),
        ([10**5000], r"prompt\[0\] is a number of 16610 bits"),
        (b"bytes", "the prompt is a bytes"),
        ({1, 2}, "the prompt is a set"),
        (None, "the prompt is a NoneType"),
        ("ab\udc00", "lone surrogate"),
    ],
)
def test_other_prompts_are_refused(processor: InputProcessor, prompt: object, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        process(processor, prompt)
    assert raised.value.param == "prompt"


def test_token_ids_in_the_parameters_are_checked(processor: InputProcessor) -> None:
    assert process(processor, [1], stop_token_ids=(VOCAB - 1,))
    with pytest.raises(InvalidRequestError, match="stop_token_ids names token"):
        process(processor, [1], stop_token_ids=(VOCAB,))
    with pytest.raises(InvalidRequestError, match="logit_bias names token -1"):
        process(processor, [1], logit_bias={-1: 1.0})


def test_the_context_is_kept_to(processor: InputProcessor) -> None:
    assert process(processor, [1] * 99).params.max_tokens == 1
    assert process(processor, [1] * 99, max_tokens=1).params.max_tokens == 1
    for length in (100, 101):
        with pytest.raises(ContextLengthError, match=f"prompt has {length} tokens; the context holds 100"):
            process(processor, [1] * length)
    with pytest.raises(ContextLengthError, match=r"90 tokens and max_tokens is 11, in all 101.* at most 10"):
        process(processor, [1] * 90, max_tokens=11)


def test_clamping_lowers_max_tokens(processor: InputProcessor) -> None:
    assert process(processor, [1] * 90, clamp=True, max_tokens=11).params.max_tokens == 10
    assert process(processor, [1] * 90, clamp=True, max_tokens=9).params.max_tokens == 9
    with pytest.raises(ContextLengthError):
        process(processor, [1] * 100, clamp=True)


def test_a_text_that_cannot_fit_is_not_tokenised(
    processor: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = " " * (processor.tokenizer.max_token_bytes * CONTEXT)
    monkeypatch.setattr(processor.tokenizer, "encode", None)
    with pytest.raises(ContextLengthError, match="at least 100 tokens"):
        process(processor, spaces)


def test_a_conversation_is_rendered_with_one_bos(processor: InputProcessor) -> None:
    request = chat(processor, [USER], max_tokens=10_000)
    assert request.prompt_ids[0] == 1
    text = processor.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert request.params.max_tokens == CONTEXT - len(request.prompt_ids)  # clamped
    assert request.params.seed is not None


#: What a template writes, and which ids it becomes where BOS is added and where not: "ab" is 2, "<s>" 3.
BOS_OF_TEMPLATES = [
    ("ab", [3, 2], [2]),
    ("{{ bos_token }}ab", [3, 2], [3, 2]),
    ("{{ bos_token }}{{ bos_token }}ab", [3, 2], [3, 2]),
    ("{{ bos_token }}ab{{ bos_token }}ab", [3, 2, 3, 2], [3, 2, 3, 2]),  # a turn of its own
    ("{{ bos_token }}", [3], [3]),
    ("<s><s><s>", [3], [3]),
    ("ab{{ bos_token }}", [3, 2, 3], [2, 3]),
]


def small_gguf_tokenizer(adds_bos: bool) -> Tokenizer:
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
            "tokenizer.ggml.token_type": [1, 1, 1, 3],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 3,
            "tokenizer.ggml.add_bos_token": adds_bos,
        }
    )


def small_directory_tokenizer(directory: Path, adds_bos: bool) -> Tokenizer:
    """The same, whose tokenizer.json writes BOS (and EOS) by itself where it is added."""
    engine = RustTokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<s>"])
    if adds_bos:
        engine.post_processor = processors.TemplateProcessing("<s> $A <s>", special_tokens=[("<s>", 3)])
    engine.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("adds_bos", [True, False], ids=["added", "not added"])
@pytest.mark.parametrize("kind", ["gguf", "directory"])
@pytest.mark.parametrize(("source", "with_bos", "without"), BOS_OF_TEMPLATES)
def test_a_conversation_begins_with_one_bos(
    tmp_path: Path, kind: str, adds_bos: bool, source: str, with_bos: list[int], without: list[int]
) -> None:
    if kind == "gguf":
        tokenizer = small_gguf_tokenizer(adds_bos)
    else:
        tokenizer = small_directory_tokenizer(tmp_path, adds_bos)
    template = ChatTemplate(source, bos_token=tokenizer.token_text(3), eos_token="")
    processor = InputProcessor(tokenizer, template, max_model_len=10, vocab_size=4)
    assert chat(processor, [USER]).prompt_ids == (with_bos if adds_bos else without)
    assert process(processor, "ab").prompt_ids == ([3, 2] if adds_bos else [2])


def test_arguments_reach_the_template(smollm2_tokenizer: Tokenizer) -> None:
    sources = {
        "default": "{{ messages[-1].content }}{{ add_generation_prompt }}{{ mood }}",
        "tool_use": "{{ tools[0].name }}",
        "rag": "{{ documents[0].title }}",
    }
    template = ChatTemplate(sources, bos_token="", eos_token="")
    processor = InputProcessor(smollm2_tokenizer, template, max_model_len=CONTEXT, vocab_size=VOCAB)

    def text(**arguments: Any) -> str:
        return smollm2_tokenizer.decode(chat(processor, [USER], ChatArguments(**arguments)).prompt_ids)

    assert text() == "hiTrue"
    assert text(add_generation_prompt=False) == "hiFalse"
    assert text(continue_final_message=True) == "hi"
    assert text(chat_template_kwargs={"mood": "!"}) == "hiTrue!"
    assert text(tools=[{"name": "find"}]) == "find"
    assert text(documents=[{"title": "T"}], template="rag") == "T"
    with pytest.raises(TypeError, match="tool"):
        text(tool=[])


def test_every_role_and_kind_of_content_is_taken(processor: InputProcessor) -> None:
    messages = [
        {"role": role, "content": ""} for role in ("system", "developer", "user", "assistant", "tool")
    ]
    assert chat(processor, messages)
    assert chat(processor, ({"role": "user", "content": [{"type": "text", "text": "hi"}]},)).prompt_ids == (
        chat(processor, [USER]).prompt_ids
    )


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        (None, "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user", "content": "hi"}, "at least one message"),
        ([USER, "hi"], r"messages\[1\] is a str"),
        ([{"content": "hi"}], r"messages\[0\].role is None"),
        ([{"role": "robot", "content": "hi"}], r"messages\[0\].role is 'robot'; .*developer"),
        ([{"role": ["user"], "content": "hi"}], r"messages\[0\].role is \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content is a NoneType"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is a int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([USER, {"role": "assistant", "content": None}], "does not take these messages: .*'content'"),
        ([{"role": "user", "content": "\ud83e"}], "lone surrogate"),
    ],
)
def test_other_conversations_are_refused(processor: InputProcessor, messages: object, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        chat(processor, messages)
    assert raised.value.param == "messages"


def test_null_content_of_an_assistant_is_the_templates_business(smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content is defined }}", bos_token="", eos_token="")
    processor = InputProcessor(smollm2_tokenizer, template, max_model_len=CONTEXT, vocab_size=VOCAB)
    request = chat(processor, [{"role": "assistant", "content": None}])
    assert smollm2_tokenizer.decode(request.prompt_ids) == "False"


def test_without_a_template_completions_are_pointed_to(smollm2_tokenizer: Tokenizer) -> None:
    processor = InputProcessor(smollm2_tokenizer, None, max_model_len=CONTEXT, vocab_size=VOCAB)
    with pytest.raises(InvalidRequestError, match=r"no chat template.*Completions work"):
        chat(processor, [USER])
    assert process(processor, "hi").prompt_ids
