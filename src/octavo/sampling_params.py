"""What a user may ask of sampling, validated once, at the door.

Rule: every field is honoured exactly or refused by name; nothing is clamped in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from octavo.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**64 - 1
#: A temperature below this is greedy: logits / T would overflow float32 long before it mattered.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen from the logits of one request.

    temperature: >= 0; 0 is greedy. top_k: 0 turns it off. top_p in (0, 1], min_p in [0, 1].
    seed: 0 <= seed < 2**64; None draws one, which the output reports.
    repetition_penalty, in [0.01, 100], covers prompt and output; presence_penalty and frequency_penalty, in
    [-2, 2], cover the output only. logit_bias: token id -> bias in [-100, 100].
    logprobs: how many alternatives to report with each sampled token (None: no logprobs at all;
    0: the sampled token's alone). prompt_logprobs: the same for each token of the prompt but the first.
    max_tokens: None means as many as the context holds; 0 computes the prompt and samples nothing.
    stop_token_ids end the output as EOS does; ignore_eos disables EOS only. min_tokens: before so many
    tokens neither EOS nor a stop token is sampled, and no stop string ends the text.
    stop: strings, of which the first to be complete in the text ends it; a str alone is one stop, and is
    kept as a tuple. The text is cut where the stop begins, or behind it with include_stop_str_in_output.
    Special tokens are no part of the text, so no stop is found in them, unless skip_special_tokens is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, math.inf)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)  # beyond, float32 overflows
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_int_range("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _in_int_range("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _in_int_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_int_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _in_int_range("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None:
            _in_int_range("max_tokens", self.max_tokens, 0, MAX_TOKENS)
            self.check_min_tokens(self.max_tokens)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        _token_ids("logit_bias", self.logit_bias)
        _token_ids("stop_token_ids", self.stop_token_ids)
        for token_id, bias in self.logit_bias.items():
            if not _is_number(bias) or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    f"logit_bias[{token_id}] is {bias}; biases lie in [-100, 100]", param="logit_bias"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS}"
                " are allowed",
                param="stop_token_ids",
            )
        msgspec.structs.force_setattr(self, "stop", _stops(self.stop))
        if self.include_stop_str_in_output and not self.stop:
            raise InvalidRequestError(
                "include_stop_str_in_output needs a stop string: give stop",
                param="include_stop_str_in_output",
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_min_tokens(self, max_tokens: int) -> None:
        """Raise InvalidRequestError where max_tokens, given or found, are fewer than min_tokens."""
        if self.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, but there can be no more than {max_tokens} "
                "tokens; lower it",
                param="min_tokens",
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError where a token id lies outside [0, vocab_size)."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}, but the model's tokens are 0..{vocab_size - 1}",
                        param=name,
                    )


def _in_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = _is_number(value) and math.isfinite(value) and low <= value <= high
    if not inside or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} is {value!r}; it must lie in {bracket}{low}, {high}]", param=name)


def _in_int_range(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value!r}; it must be an integer in {low}..{high}", param=name)


def _token_ids(name: str, ids: Iterable[int]) -> None:
    for token_id in ids:
        if type(token_id) is not int:
            raise InvalidRequestError(f"{name} has {token_id!r}; token ids are integers", param=name)


def _stops(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, tuple | list):
        raise InvalidRequestError(
            f"stop is a {type(value).__name__}; it must be text or a list", param="stop"
        )
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed", param="stop"
        )
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequestError(
                f"stop[{index}] is a {type(stop).__name__}; stops are strings", param="stop"
            )
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequestError(
                f"stop[{index}] has {len(stop)} characters; it must have 1..{MAX_STOP_CHARACTERS}",
                param="stop",
            )
        if any("\ud800" <= character <= "\udfff" for character in stop):
            raise InvalidRequestError(
                f"stop[{index}] has a lone surrogate, which no text has; send whole characters", param="stop"
            )
    return tuple(stops)


def _is_number(value: object) -> bool:
    """Annotations are checked where JSON is read, not where Python calls."""
    return isinstance(value, int | float) and not isinstance(value, bool)
