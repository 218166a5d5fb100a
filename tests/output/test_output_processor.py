"""Folds engine output into request output, with SmolLM2's tokenizer."""

from __future__ import annotations

import codecs
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequestError
from octavo.input.tokenizer import Tokenizer
from octavo.messages import EngineOutput, EngineRequest, TokenLogprobs
from octavo.output.output_processor import OutputProcessor, Processed
from octavo.outputs import RequestOutput
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams

IM_END = 2


@pytest.fixture
def processor(smollm2_tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(smollm2_tokenizer)


def add(
    processor: OutputProcessor, request_id: str = "r", *, resumed: tuple[int, ...] = (), **params: Any
) -> None:
    processor.add(
        EngineRequest(
            request_id=request_id,
            prompt_ids=[5, 6, 7],
            params=SamplingParams(seed=11, max_tokens=50, **params),
            eos_ids=(IM_END, 0),
            output_ids=list(resumed),
        )
    )


def step(
    processor: OutputProcessor, ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> RequestOutput:
    output = EngineOutput(request_id="r", new_token_ids=ids, finish_reason=finish, **fields)
    (result,) = processor.process([output]).outputs
    return result


def test_text_grows_by_deltas_until_eos(processor: OutputProcessor, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("Bonjour, 🥹!")
    add(processor)
    text = ""
    for index, token_id in enumerate(ids):
        result = step(processor, [token_id], num_cached_tokens=2 if index == 0 else 0)
        text += result.delta
        assert result.text == text
        assert result.token_ids == ids[: index + 1]
        assert result.new_token_ids == [token_id]
        assert (result.prompt_tokens, result.cached_tokens, result.seed) == (3, 2, 11)
        assert not result.finished
    last = step(processor, [IM_END], FinishReason.STOP)
    assert (last.text, last.delta, last.finish_reason) == ("Bonjour, 🥹!", "", FinishReason.STOP)
    assert last.token_ids == [*ids, IM_END]
    assert processor.process([EngineOutput(request_id="r", new_token_ids=[9])]).outputs == []


def test_earlier_outputs_do_not_change(processor: OutputProcessor) -> None:
    add(processor)
    first = step(processor, [20])
    step(processor, [21])
    assert first.token_ids == [20]


def test_an_output_costs_what_its_step_added(processor: OutputProcessor) -> None:
    """Every output of a long answer is kept; copies of all before it would take 8 n² / 2 bytes."""
    add(processor, logprobs=0)
    logprobs = [TokenLogprobs(token_id=20, logprob=-0.5, rank=1, top=[])]
    count = 4000
    tracemalloc.start()
    try:
        outputs = [step(processor, [20], logprobs=logprobs) for _ in range(count)]
        nbytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert nbytes < 1000 * count
    for number in (1, 7, count):
        output = outputs[number - 1]
        assert output.token_ids == [20] * number
        assert output.text == outputs[0].text * number
        assert output.logprobs == logprobs * number
        assert output.new_logprobs == logprobs


def test_a_stop_token_is_an_id_but_no_text(processor: OutputProcessor, smollm2_tokenizer: Tokenizer) -> None:
    hello, stop = smollm2_tokenizer.encode("hello"), smollm2_tokenizer.encode(".")
    add(processor, stop_token_ids=tuple(stop))
    result = step(processor, [*hello, *stop], FinishReason.STOP)
    assert result.text == "hello"
    assert result.token_ids == result.new_token_ids == [*hello, *stop]


def test_the_last_token_within_the_limit_is_text(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("one two")
    add(processor)
    assert step(processor, ids, FinishReason.LENGTH).text == "one two"


def test_half_a_character_is_flushed_at_the_end(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("🥹")
    add(processor)
    assert step(processor, ids[:2]).text == ""
    assert step(processor, [IM_END], FinishReason.STOP).delta == "\ufffd"


def test_a_resumed_request_goes_on_where_it_was(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("so 🥹 far")
    for split in range(len(ids)):
        add(processor, resumed=tuple(ids[:split]))
        result = step(processor, ids[split:], FinishReason.LENGTH)
        assert result.text == "so 🥹 far"
        assert result.text.endswith(result.delta)
        assert (result.token_ids, result.new_token_ids) == (ids, ids[split:])


def test_an_error_ends_one_request_only(processor: OutputProcessor) -> None:
    add(processor)
    add(processor, "other")
    results = processor.process(
        [
            EngineOutput(
                request_id="r", new_token_ids=[], finish_reason=FinishReason.ERROR, error="NaN logits"
            ),
            EngineOutput(request_id="nobody", new_token_ids=[4]),
            EngineOutput(request_id="other", new_token_ids=[30]),
            EngineOutput(request_id="other", new_token_ids=[31]),
        ]
    ).outputs
    assert [(r.request_id, r.finish_reason, r.error, r.token_ids) for r in results] == [
        ("r", FinishReason.ERROR, "NaN logits", []),
        ("other", None, None, [30]),
        ("other", None, None, [30, 31]),
    ]


def test_logprobs_are_those_of_all_tokens_so_far(processor: OutputProcessor) -> None:
    def logprobs(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=[(token_id, -0.5)])

    add(processor, logprobs=1)
    step(processor, [20], logprobs=[logprobs(20)])
    result = step(processor, [21, 22], logprobs=[logprobs(21), logprobs(22)])
    assert [entry.token_id for entry in result.logprobs] == result.token_ids


def test_an_aborted_request_is_forgotten(processor: OutputProcessor) -> None:
    add(processor)
    processor.abort("r")
    processor.abort("r")
    assert processor.process([EngineOutput(request_id="r", new_token_ids=[9])]).outputs == []
    add(processor)  # its id is free again


def test_an_id_under_way_is_refused(processor: OutputProcessor) -> None:
    add(processor)
    with pytest.raises(InvalidRequestError, match="'r' is under way"):
        add(processor)


# -- stop strings -----------------------------------------------------------------------------------


def one_by_one(processor: OutputProcessor, ids: list[int]) -> list[RequestOutput]:
    """Outputs of ids that come one a step, up to the one that ends the request."""
    results = []
    for token_id in ids:
        results.append(step(processor, [token_id]))
        if results[-1].finished:
            break
    return results


def test_a_stop_string_ends_the_request(processor: OutputProcessor, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("One. Two. 🥹 Three.")
    add(processor, stop=(". 🥹",))
    results = one_by_one(processor, ids)
    last = results[-1]
    assert (last.text, last.finish_reason) == ("One. Two", FinishReason.STOP)
    assert "".join(result.delta for result in results) == last.text
    assert last.token_ids == [token_id for result in results for token_id in result.new_token_ids]
    assert smollm2_tokenizer.decode(last.token_ids) == "One. Two. 🥹"
    assert processor.process([EngineOutput(request_id="r", new_token_ids=[9])]) == Processed([], [])


def test_what_comes_behind_a_stop_in_the_same_step_is_dropped(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    def logprobs(ids: list[int]) -> list[TokenLogprobs]:
        return [TokenLogprobs(token_id=i, logprob=-0.5, rank=1, top=[]) for i in ids]

    ids = smollm2_tokenizer.encode("one two three four")
    add(processor, stop="two", include_stop_str_in_output=True, logprobs=0)
    processed = processor.process(
        [
            EngineOutput(request_id="r", new_token_ids=ids[:3], logprobs=logprobs(ids[:3])),
            EngineOutput(request_id="r", new_token_ids=ids[3:], logprobs=logprobs(ids[3:])),
        ]
    )
    (result,) = processed.outputs
    assert processed.stopped == ["r"]
    assert (result.text, result.delta, result.finish_reason) == ("one two", "one two", FinishReason.STOP)
    assert result.token_ids == result.new_token_ids == ids[:2]
    assert result.logprobs == logprobs(ids[:2])


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR])
def test_what_was_held_back_comes_at_the_end(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer, reason: FinishReason
) -> None:
    add(processor, stop="END")
    held = one_by_one(processor, smollm2_tokenizer.encode("so far: EN"))[-1]
    assert held.text == "so far: "
    last = step(processor, [], reason)
    assert (last.text, last.delta, last.finish_reason) == ("so far: EN", "EN", reason)


def test_eos_gives_out_what_was_held_back(processor: OutputProcessor, smollm2_tokenizer: Tokenizer) -> None:
    add(processor, stop=["\n\n", "!?"])
    one_by_one(processor, smollm2_tokenizer.encode("wait!"))
    last = step(processor, [IM_END], FinishReason.STOP)
    assert (last.text, last.delta) == ("wait!", "!")


def test_a_stop_that_the_last_token_completes(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("one two")
    add(processor, stop="two")
    processed = processor.process(
        [EngineOutput(request_id="r", new_token_ids=ids, finish_reason=FinishReason.LENGTH)]
    )
    (result,) = processed.outputs
    assert (result.text, result.finish_reason) == ("one ", FinishReason.STOP)
    assert processed.stopped == []  # the engine has ended it already


def test_a_stop_of_a_character_that_stays_half(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("a🥹")[:-1]
    add(processor, stop="\ufffd")
    assert one_by_one(processor, ids)[-1].finish_reason is None
    last = step(processor, [IM_END], FinishReason.STOP)
    assert last.text == "a"


def test_a_request_that_is_stopped_already_is_not_resumed(
    processor: OutputProcessor, smollm2_tokenizer: Tokenizer
) -> None:
    ids = smollm2_tokenizer.encode("one two three")
    with pytest.raises(InvalidRequestError, match="a stop string, with token 2 of 3: the request is compl"):
        add(processor, resumed=tuple(ids), stop="two")
    add(processor)  # nothing of it was kept


class Pieces:
    """Tokens whose bytes begin, end and are parts of the characters é and 🥹."""

    special_ids = frozenset({0})
    _bytes = (b"<s>", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\xa5", b"\xb9", "a🥹b".encode())

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    first_token_bytes = token_bytes


def reference(ids: list[int], stops: list[str], *, include_stop: bool) -> tuple[str, int, bool]:
    """Text, number of tokens, and whether a stop ended it: by decoding each beginning of the ids."""
    for count in range(len(ids) + 1):
        final = count == len(ids)
        raw = b"".join(Pieces().token_bytes(i) for i in ids[:count] if i)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(raw, final)
        for end in range(len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                return text[: end if include_stop else end - max(map(len, complete))], count, True
    return text, len(ids), False


@given(
    ids=st.lists(st.integers(0, 9), max_size=14),
    stops=st.lists(st.text(st.sampled_from("abé🥹\ufffd"), min_size=1, max_size=4), max_size=3),
    include_stop=st.booleans(),
    sizes=st.lists(st.integers(1, 4), max_size=14),
    resumed=st.integers(0, 14),
)
def test_any_ids_in_any_steps_are_cut_as_the_whole_text_is(
    ids: list[int], stops: list[str], include_stop: bool, sizes: list[int], resumed: int
) -> None:
    include_stop = include_stop and bool(stops)
    text, count, stopped = reference(ids, stops, include_stop=include_stop)
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include_stop)

    def run(first: int, sizes: list[int]) -> tuple[str, str, list[int], FinishReason | None]:
        processor = OutputProcessor(Pieces())
        before, rest = ids[:first], ids[first:]
        processor.add(EngineRequest(request_id="r", prompt_ids=[1], params=params, output_ids=before))
        streamed = ""
        for size in [*sizes, len(ids)]:
            now, rest = rest[:size], rest[size:]
            reason = None if rest else FinishReason.LENGTH
            output = EngineOutput(request_id="r", new_token_ids=now, finish_reason=reason)
            (result,) = processor.process([output]).outputs
            streamed += result.delta
            if result.finished:
                break
        return result.text, streamed, result.token_ids, result.finish_reason

    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    assert run(0, sizes) == (text, text, ids[:count], reason)
    assert run(0, []) == (text, text, ids[:count], reason)
    if resumed < count or (resumed == count and not stopped):
        whole, streamed, token_ids, _ = run(resumed, sizes)
        assert (whole, token_ids) == (text, ids[:count])
        assert text.endswith(streamed)
