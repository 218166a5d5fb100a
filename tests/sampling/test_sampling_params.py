"""Every field is honoured exactly or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.errors import InvalidRequestError
from octavo.sampling_params import (
    GREEDY_TEMPERATURE,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")

ACCEPTED: list[tuple[str, Any]] = [
    ("temperature", 0), ("temperature", 0.0), ("temperature", 1e300), ("temperature", 5e-324),
    ("top_p", 1), ("top_p", 5e-324), ("min_p", 0), ("min_p", 1.0),
    ("repetition_penalty", 0.01), ("repetition_penalty", 100.0),
    ("presence_penalty", -2), ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0), ("frequency_penalty", 2),
    ("top_k", 0), ("top_k", 2**31 - 1), ("seed", 0), ("seed", 2**64 - 1), ("seed", None),
    ("logprobs", None), ("logprobs", 0), ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", None), ("prompt_logprobs", 0), ("prompt_logprobs", MAX_LOGPROBS),
    ("min_tokens", 0), ("min_tokens", 2**31 - 1),
    ("max_tokens", None), ("max_tokens", 0), ("max_tokens", 1), ("max_tokens", 2**31 - 1),
    ("logit_bias", {0: -100, 1: 100.0}), ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS))),
    ("stop", ()), ("stop", ("x" * MAX_STOP_CHARACTERS,) * MAX_STOPS), ("stop", ("\n", "🥹")),
]  # fmt: skip
REFUSED: list[tuple[str, Any]] = [
    ("temperature", -1e-9), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"),
    ("temperature", True), ("temperature", None),
    ("top_p", 0), ("top_p", 0.0), ("top_p", 1.0000001), ("top_p", -0.1), ("top_p", NAN),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", INF),
    ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300), ("repetition_penalty", NAN),
    ("presence_penalty", -2.1), ("presence_penalty", 2.1), ("presence_penalty", NAN),
    ("frequency_penalty", -2.1), ("frequency_penalty", 2.1), ("frequency_penalty", INF),
    ("top_k", -1), ("top_k", 2**31), ("top_k", 1.5), ("top_k", True), ("top_k", None),
    ("seed", -1), ("seed", 2**64), ("seed", 1.0), ("seed", "1"),
    ("logprobs", -1), ("logprobs", MAX_LOGPROBS + 1), ("logprobs", True), ("logprobs", 1.0),
    ("prompt_logprobs", -1), ("prompt_logprobs", MAX_LOGPROBS + 1), ("prompt_logprobs", False),
    ("min_tokens", -1), ("min_tokens", 2**31), ("min_tokens", None), ("min_tokens", 2.0),
    ("max_tokens", -1), ("max_tokens", 2**31), ("max_tokens", 3.0),
    ("logit_bias", {3: 100.1}), ("logit_bias", {3: -100.1}), ("logit_bias", {3: NAN}),
    ("logit_bias", {"3": 1.0}), ("logit_bias", {3.0: 1.0}), ("logit_bias", {3: "1"}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))), ("stop_token_ids", ("2",)),
    ("stop_token_ids", (2.0,)),
    ("stop", ("",)), ("stop", ""), ("stop", ("x" * (MAX_STOP_CHARACTERS + 1),)), ("stop", ("a", 3)),
    ("stop", ("x",) * (MAX_STOPS + 1)), ("stop", None), ("stop", {"a"}), ("stop", 5), ("stop", ("a\ud83e",)),
    ("include_stop_str_in_output", True),
]  # fmt: skip


def show(case: object) -> str:
    return repr(case)[:20]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=show)
def test_bounds_are_inside(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=show)
def test_what_is_outside_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_messages_say_what_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match=r"^top_p is 0; it must lie in \(0\.0, 1\.0\]$"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidRequestError, match=r"^top_k is -1; it must be an integer in 0\.\.2147483647$"):
        SamplingParams(top_k=-1)
    with pytest.raises(InvalidRequestError, match=r"^logit_bias\[3\] is 101; biases lie in \[-100, 100\]$"):
        SamplingParams(logit_bias={3: 101})


def test_a_stop_may_stand_alone() -> None:
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop="a", include_stop_str_in_output=True).include_stop_str_in_output


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
    with pytest.raises(msgspec.ValidationError, match="beam_width"):
        msgspec.json.decode(b'{"beam_width": 4}', type=SamplingParams)


def test_min_tokens_are_no_more_than_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, but there can be no more than 4 tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_it_travels() -> None:
    params = SamplingParams(seed=2**64 - 1, logit_bias={7: -3.5}, stop_token_ids=(1, 2), stop="x")
    data = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(data, type=SamplingParams) == params


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 100, 2**40])
def test_token_ids_are_those_of_the_model(field: str, token_id: int) -> None:
    params = SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else (token_id,)})
    with pytest.raises(InvalidRequestError, match=rf"{field} names token {token_id}, but .* are 0\.\.99"):
        params.check_vocabulary(100)


def test_token_ids_at_the_ends() -> None:
    params = SamplingParams(logit_bias={0: 1, 99: 1}, stop_token_ids=(0, 99))
    params.check_vocabulary(100)
    with pytest.raises(InvalidRequestError, match="token 99"):
        params.check_vocabulary(99)


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=GREEDY_TEMPERATURE / 2).greedy
    assert not SamplingParams(temperature=GREEDY_TEMPERATURE).greedy
