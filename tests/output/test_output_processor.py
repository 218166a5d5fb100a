"""Folds engine output into request output, with SmolLM2's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequestError
from octavo.input.tokenizer import Tokenizer
from octavo.messages import EngineOutput, EngineRequest, TokenLogprobs
from octavo.output.output_processor import OutputProcessor
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
    (result,) = processor.process([output])
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
    assert processor.process([EngineOutput(request_id="r", new_token_ids=[9])]) == []


def test_earlier_outputs_do_not_change(processor: OutputProcessor) -> None:
    add(processor)
    first = step(processor, [20])
    step(processor, [21])
    assert first.token_ids == [20]


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
    )
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
    assert processor.process([EngineOutput(request_id="r", new_token_ids=[9])]) == []
    add(processor)  # its id is free again


def test_an_id_under_way_is_refused(processor: OutputProcessor) -> None:
    add(processor)
    with pytest.raises(InvalidRequestError, match="'r' is under way"):
        add(processor)
