"""LLM: what goes in, what comes out in which order, and that nothing stays behind."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from octavo.input.chat_template import ChatTemplate
from octavo.messages import EngineOutput, ModelRunnerOutput
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.scheduler.scheduler import Scheduler
from tiny_models import EOS_ID, NUM_TOKENS, make_llama_directory, write_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=0)
PENALISED = SamplingParams(
    temperature=0.8, seed=6, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=16, ignore_eos=True
)
PROMPTS = ["the cat", "a", "The quick brown fox jumps over the lazy dog, the dog over the fox.", "xyz " * 30]
#: F32 KV of the tiny model: 16 tokens, 2 layers, K and V, 2 heads of 16.
BLOCK_NBYTES = 16 * 2 * 2 * 2 * 16 * 4


def make_llm(path: Path, **settings: object) -> LLM:
    return LLM(str(path), **{"threads": 1, "max_model_len": 512, "kv_dtype": "f32", **settings})


@pytest.fixture(scope="module")
def shared_llm(tiny_path: Path) -> Iterator[LLM]:
    with make_llm(tiny_path) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """A model that each test leaves as idle as it found it."""
    yield shared_llm
    assert_idle(shared_llm)


def core_of(llm: LLM) -> EngineCore:
    return llm._client._core


def assert_idle(llm: LLM) -> None:
    """No request, no stream, and every block back."""
    scheduler = core_of(llm).scheduler
    scheduler.check_integrity()
    assert not scheduler.has_requests
    assert scheduler.num_in_flight == 0
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks
    assert not llm._inboxes
    assert not llm._outputs._streams


def essence(output: RequestOutput) -> tuple[object, ...]:
    """What must be the same, to the bit, whatever else was going on."""
    return output.text, output.token_ids, output.logprobs, output.finish_reason, output.prompt_tokens


# -- prompts and parameters -------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [9, 2, 5, 1]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params, progress=False)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.prompt_tokens for output in outputs] == [
        len(llm._inputs.tokenizer.encode(prompt)) for prompt in PROMPTS
    ]
    assert all(output.finish_reason is FinishReason.LENGTH for output in outputs)
    assert len({output.request_id for output in outputs}) == 4


def test_one_prompt_as_text_or_as_ids(llm: LLM) -> None:
    ids = llm._inputs.tokenizer.encode("the cat")
    (text,) = llm.generate("the cat", GREEDY, progress=False)
    for prompt in (ids, tuple(ids), [ids], ["the cat"]):
        (other,) = llm.generate(prompt, GREEDY, progress=False)
        assert essence(other) == essence(text)


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []
    assert llm.generate([], [], progress=False) == []
    assert llm.chat([], GREEDY, progress=False) == []


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="2 SamplingParams were given for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY], progress=False)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "the prompt has no tokens"),
        ([], "the prompt has no tokens"),
        ([1, -1], r"prompt\[1\] is -1"),
        ([1, 2**62], r"prompt\[1\] is 4611686018427387904"),
        ([1, True], r"prompt\[1\] is True, a bool"),
        (["a"], r"prompt\[0\] is 'a', a str"),
        (5, "the prompt is a int"),
        ("\ud800", "lone surrogate"),
        ([1] * 512, "the prompt has 512 tokens; the context holds 512"),
        ("a" * 100_000, "the prompt has at least"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(
    llm: LLM, bad: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "step", lambda self: pytest.fail("a step ran"))
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(["good", bad, "good"], GREEDY, progress=False)
    assert_idle(llm)
    monkeypatch.undo()
    assert llm.generate("good", GREEDY, progress=False)[0].finished


def test_what_the_scheduler_refuses_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = Scheduler.add, []

    def picky(self: Scheduler, message: object) -> None:
        if len(added) == 2:
            raise InvalidRequestError("no third one")
        added.append(message)
        add(self, message)

    monkeypatch.setattr(Scheduler, "add", picky)
    with pytest.raises(InvalidRequestError, match="no third one"):
        llm.generate(["a", "b", "c"], GREEDY, progress=False)
    assert_idle(llm)


def test_max_tokens_and_the_context(llm: LLM) -> None:
    prompt = [1] * 500
    endless = SamplingParams(temperature=0, ignore_eos=True)
    (output,) = llm.generate(prompt, endless, progress=False)
    assert (len(output.token_ids), output.finish_reason) == (12, FinishReason.LENGTH)
    with pytest.raises(ContextLengthError, match="Lower max_tokens to at most 12"):
        llm.generate(prompt, SamplingParams(max_tokens=13), progress=False)


def test_a_seed_that_was_drawn_repeats_the_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = llm.generate(["the cat"] * 2, params, progress=False)
    assert first.seed is not None
    assert first.seed != second.seed
    again = SamplingParams(max_tokens=20, ignore_eos=True, seed=first.seed)
    assert llm.generate("the cat", again, progress=False)[0].token_ids == first.token_ids


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": "cat"}]
    text = "<|im_start|>system\nthe<|im_end|>\n<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n"
    (expected,) = llm.generate(text, GREEDY, progress=False)
    (single,) = llm.chat(messages, GREEDY, progress=False)
    first, second = llm.chat([messages, messages[1:]], [GREEDY, SAMPLED], progress=False)
    streamed = list(llm.stream(messages, GREEDY))[-1]
    for output in (single, first, streamed):
        assert essence(output) == essence(expected)
    assert len(second.token_ids) == SAMPLED.max_tokens


def test_the_last_message_is_gone_on_with(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat is"}]
    text = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\ncat is"
    (expected,) = llm.generate(text, GREEDY, progress=False)
    for output in (
        *llm.chat(messages, GREEDY, progress=False, continue_final_message=True),
        list(llm.stream(messages, GREEDY, continue_final_message=True))[-1],
    ):
        assert essence(output) == essence(expected)
    (closed,) = llm.chat(messages, GREEDY, progress=False, add_generation_prompt=False)
    assert closed.prompt_tokens == len(llm._inputs.tokenizer.encode(text + "<|im_end|>\n"))


def test_tools_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ tools[0].name }}", bos_token="", eos_token="")
    monkeypatch.setattr(llm._inputs, "template", template)
    (output,) = llm.chat(
        [{"role": "user", "content": "?"}], GREEDY, progress=False, tools=[{"name": "the cat"}]
    )
    assert essence(output) == essence(llm.generate("the cat", GREEDY, progress=False)[0])


def test_arguments_of_the_template_are_for_conversations(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="tools: this is for conversations"):
        list(llm.stream("the cat", GREEDY, tools=[]))


def test_a_conversation_that_is_none_is_refused(llm: LLM) -> None:
    for bad in ([{"role": "pirate", "content": "hi"}], [{"role": "user"}], [{}]):
        with pytest.raises(InvalidRequestError):
            llm.chat(bad, GREEDY, progress=False)


def test_progress_does_not_touch_standard_output(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().out == ""


def test_every_file_of_a_directory_may_name_ends(tmp_path: Path) -> None:
    make_llama_directory(tmp_path, eos_token_id=10)
    write_tokenizer(tmp_path)
    generation = {"eos_token_id": [NUM_TOKENS - 3, 11]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with make_llm(tmp_path) as llm:
        for token_id, is_end in ((EOS_ID, True), (NUM_TOKENS - 3, True), (10, True), (11, True), (12, False)):
            params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token_id: 100})
            (output,) = llm.generate("the cat", params, progress=False)
            assert output.finish_reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)
            assert output.token_ids == [token_id] * (1 if is_end else 3)


# -- streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_stream_adds_up_to_generate(llm: LLM, params: SamplingParams) -> None:
    for prompt in PROMPTS:
        (whole,) = llm.generate(prompt, params, progress=False)
        pieces = list(llm.stream(prompt, params))
        assert "".join(piece.delta for piece in pieces) == whole.text
        assert [t for piece in pieces for t in piece.new_token_ids] == whole.token_ids
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert essence(pieces[-1]) == essence(whole)
        assert len(pieces) > 1


def test_a_stream_that_is_closed_is_aborted(llm: LLM) -> None:
    stream = llm.stream("the cat", SAMPLED)
    next(stream)
    assert core_of(llm).has_requests
    stream.close()
    assert_idle(llm)
    assert list(stream) == []


def test_a_stream_that_is_dropped_is_aborted(llm: LLM) -> None:
    for output in llm.stream("the cat", SAMPLED):
        assert not output.finished
        break
    assert_idle(llm)


def test_streams_may_be_open_side_by_side(llm: LLM) -> None:
    expected = {prompt: llm.generate(prompt, SAMPLED, progress=False)[0] for prompt in PROMPTS}
    streams = {prompt: llm.stream(prompt, SAMPLED) for prompt in PROMPTS}
    last = {prompt: next(stream) for prompt, stream in streams.items()}
    (meanwhile,) = llm.generate("a", GREEDY, progress=False)  # it steps the streams along
    assert meanwhile.finished
    text = {prompt: output.delta for prompt, output in last.items()}
    while streams:
        for prompt, stream in list(streams.items()):
            output = next(stream, None)
            if output is None:
                del streams[prompt]
            else:
                assert output.prompt_tokens == last[prompt].prompt_tokens
                text[prompt] += output.delta
                last[prompt] = output
    for prompt, whole in expected.items():
        assert essence(last[prompt]) == essence(whole)
        assert text[prompt] == whole.text


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT as a terminal's Python has it; a shell's background jobs inherit one that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_in_a_step_leaves_an_engine_that_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate("the cat", GREEDY, progress=False)
    executor = core_of(llm)._executor
    execute = executor.execute

    def interrupted(plan: object) -> None:
        signal.raise_signal(signal.SIGINT)
        execute(plan)

    for _ in range(2):
        stream = llm.stream("the dog", GREEDY)
        next(stream)
        monkeypatch.setattr(executor, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        monkeypatch.undo()
        assert_idle(llm)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert essence(llm.generate("the cat", GREEDY, progress=False)[0]) == essence(expected)


def test_llm_works_in_another_thread(llm: LLM) -> None:
    found: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate("the cat", GREEDY, progress=False)))
    thread.start()
    thread.join()
    assert essence(found[0]) == essence(llm.generate("the cat", GREEDY, progress=False)[0])


# -- stop strings -----------------------------------------------------------------------------------


def stop_within(output: RequestOutput) -> tuple[str, str]:
    """A stop of two characters from the middle of a text, and what comes before it."""
    text = output.text
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    return stop, text[: text.find(stop)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_stop_string_cuts_text_and_ids(llm: LLM, params: SamplingParams) -> None:
    for prompt in PROMPTS:
        (whole,) = llm.generate(prompt, params, progress=False)
        stop, before = stop_within(whole)
        stopping = msgspec.structs.replace(params, stop=stop)
        (output,) = llm.generate(prompt, stopping, progress=False)
        assert (output.text, output.finish_reason) == (before, FinishReason.STOP)
        count = len(output.token_ids)
        assert 0 < count < len(whole.token_ids)
        assert output.token_ids == whole.token_ids[:count]
        assert output.logprobs == whole.logprobs[:count]
        pieces = list(llm.stream(prompt, stopping))
        assert "".join(piece.delta for piece in pieces) == before
        assert essence(pieces[-1]) == essence(output)
        including = msgspec.structs.replace(stopping, include_stop_str_in_output=True)
        assert llm.generate(prompt, including, progress=False)[0].text == before + stop


def test_the_engine_computes_nothing_beyond_a_stop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = llm.generate("the cat", SAMPLED, progress=False)
    update, sampled = Scheduler.update, []

    def counted(self: Scheduler, result: ModelRunnerOutput) -> list[EngineOutput]:
        sampled.extend(token.token_id for token in result.sampled)
        return update(self, result)

    monkeypatch.setattr(Scheduler, "update", counted)
    params = msgspec.structs.replace(SAMPLED, stop=stop_within(whole)[0])
    (output,) = llm.generate("the cat", params, progress=False)
    assert sampled == output.token_ids


def test_a_stop_ends_one_request_and_no_other(llm: LLM) -> None:
    (whole,) = llm.generate("the cat", SAMPLED, progress=False)
    stopping = msgspec.structs.replace(SAMPLED, stop=stop_within(whole)[0])
    first, second, third = llm.generate(["the cat"] * 3, [SAMPLED, stopping, SAMPLED], progress=False)
    assert essence(first) == essence(third) == essence(whole)
    assert second.finish_reason is FinishReason.STOP


# -- faults and the end -----------------------------------------------------------------------------


def test_a_failed_step_is_an_output_with_its_cause(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(plan: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(core_of(llm)._executor, "execute", broken)
    for output in llm.generate(["a", "b"], GREEDY, progress=False):
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "the step that computed this request failed: RuntimeError: out of luck"
    monkeypatch.undo()
    assert llm.generate("a", GREEDY, progress=False)[0].finish_reason is FinishReason.LENGTH


def test_a_closed_llm_says_so(tiny_path: Path) -> None:
    llm = make_llm(tiny_path)
    stream = llm.stream("the cat", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("the cat", GREEDY, progress=False)
    assert_idle(llm)


def test_a_setting_that_is_none_is_refused(tiny_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown settings: max_seqs"):
        make_llm(tiny_path, max_seqs=4)


# -- same bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_batch_is_each_alone(tiny_path: Path, backend: str) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    params = [GREEDY, SAMPLED] * len(PROMPTS)
    settings = {"backend": backend, "prefix_caching": False, "max_num_batched_tokens": 40}
    with make_llm(tiny_path, **settings) as llm:
        together = llm.generate(prompts, params, progress=False)
        alone = [llm.generate(p, q, progress=False)[0] for p, q in zip(prompts, params, strict=True)]
        assert [essence(output) for output in together] == [essence(output) for output in alone]
        assert_idle(llm)


def test_a_cache_hit_changes_nothing(llm: LLM) -> None:
    for i, params in enumerate((GREEDY, SAMPLED, PENALISED)):
        prompt = [200 + i, *range(100)]  # nobody else's
        (miss,) = llm.generate(prompt, params, progress=False)
        (hit,) = llm.generate(prompt, params, progress=False)
        assert (miss.cached_tokens, hit.cached_tokens) == (0, 96)
        assert essence(hit) == essence(miss)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_bug_36_preempted_is_not_preempted(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, prefix_caching: bool
) -> None:
    """Penalties and seeds are of the request's own tokens, however often these were computed."""
    prompts = [[i, *range(30)] for i in range(6)]
    shared = {"temperature": temperature, "max_tokens": 90, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(seed=i, frequency_penalty=0.1 * i, **shared) for i in range(6)]
    preempt, preempted = Scheduler._preempt, []

    def counted(self: Scheduler, request: object) -> None:
        preempted.append(request)
        preempt(self, request)

    monkeypatch.setattr(Scheduler, "_preempt", counted)
    settings = {"max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 6}
    settings["prefix_caching"] = prefix_caching
    with make_llm(tiny_path, **settings) as llm:
        plenty = llm.generate(prompts, params, progress=False)
        assert not preempted
    with make_llm(tiny_path, **settings, kv_cache_gib=20 * BLOCK_NBYTES / 2**30) as llm:
        assert llm.info.bill.num_blocks == 20
        short = llm.generate(prompts, params, progress=False)
        assert preempted
        assert_idle(llm)
    assert [essence(output) for output in short] == [essence(output) for output in plenty]
    assert all(len(output.token_ids) == 90 for output in short)
