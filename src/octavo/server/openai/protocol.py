"""What the OpenAI routes take and refuse.

Rule: a field is honoured, or on the short list of harmless ones that are accepted and ignored, or
refused by name. The bounds in the schema are the ones that `SamplingParams` and the engine check.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from octavo.engine.parallel_sampling import MAX_N
from octavo.errors import InvalidRequestError
from octavo.input.input_processor import MAX_CACHE_SALT, ROLES, ChatArguments
from octavo.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    SamplingParams,
)

#: Accepted and without effect: they describe the caller, or ask for what is the case anyway.
IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
#: Prompts of one request, and answers to all of them.
MAX_PROMPTS = 128
MAX_CHOICES = 1024
_MAX_PRIORITY = 2**31 - 1


def _as_list(value: Any) -> Any:
    """A text alone is one stop."""
    return [value] if isinstance(value, str) else value


def _within(**bounds: Any) -> Any:
    """Bounds for the schema, which `SamplingParams` checks."""
    return Field(json_schema_extra=bounds)


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

Temperature = Annotated[float, _within(minimum=0)]
TopP = Annotated[float, _within(exclusiveMinimum=0, maximum=1)]
TopK = Annotated[int, _within(minimum=0, maximum=2**31 - 1)]
MinP = Annotated[float, _within(minimum=0, maximum=1)]
Seed = Annotated[int | None, _within(minimum=0, maximum=MAX_SEED)]
Penalty = Annotated[float, _within(minimum=-2, maximum=2)]
RepetitionPenalty = Annotated[float, _within(minimum=0.01, maximum=100)]
Logprobs = Annotated[int | None, _within(minimum=0, maximum=MAX_LOGPROBS)]
MinTokens = Annotated[int, _within(minimum=0, maximum=MAX_TOKENS)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Stop = Annotated[
    list[str],
    BeforeValidator(_as_list),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}),
]
StopTokenIds = Annotated[list[int], _within(items=_TOKEN_ID, maxItems=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[
    dict[str, float],
    _within(
        maxProperties=MAX_LOGIT_BIAS,
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
]
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
            },
            "required": ["role", "content"],
        }
    ),
]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class StrictModel(BaseModel):
    """A JSON object of known fields. A null is as good as no field. Nothing is converted: "0.5" is no number
    and 1 is no true."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None or key in cls._null_says()}
        return value

    @classmethod
    def _null_says(cls) -> frozenset[str]:
        """Fields whose null says something else than leaving them out."""
        return frozenset()


class StreamOptions(StrictModel):
    """How a stream ends."""

    include_usage: bool = False


class SamplingFields(StrictModel):
    """What chat and completions have in common. Beyond OpenAI's fields: top_k, min_p, repetition_penalty,
    prompt_logprobs, priority, cache_salt, min_tokens, stop_token_ids, ignore_eos, include_stop_str_in_output,
    skip_special_tokens; and more stops than its four.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    seed: Seed = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: LogitBias = Field(default_factory=dict)
    prompt_logprobs: Logprobs = None
    min_tokens: MinTokens = 0
    stop: Stop = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    stop_token_ids: StopTokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    priority: Annotated[int, Field(ge=-_MAX_PRIORITY, le=_MAX_PRIORITY)] = 0
    cache_salt: Annotated[str, _within(maxLength=MAX_CACHE_SALT)] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if key not in IGNORED_FIELDS}
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()},
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions. Further fields beyond OpenAI's: add_generation_prompt,
    continue_final_message, chat_template_kwargs."""

    messages: Annotated[list[Message], _within(minItems=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def sampling_params(self) -> SamplingParams:
        """The engine's terms for what was asked; InvalidRequestError where they can't be met."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequestError(
                f"max_completion_tokens is {self.max_completion_tokens}, but max_tokens, its old name, is "
                f"{self.max_tokens}; give one",
                param="max_tokens",
            )
        return self._params(
            max_tokens=limits.pop() if limits else None,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )

    def chat_arguments(self) -> ChatArguments:
        """What was asked of the chat template, which checks it."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class CompletionRequest(SamplingFields):
    """POST /v1/completions. A further field beyond OpenAI's: add_special_tokens.

    max_tokens: null means as many as the context holds; 0 samples nothing. best_of: only n.
    """

    prompt: Prompt
    max_tokens: Annotated[int | None, _within(minimum=0, maximum=MAX_TOKENS)] = 16
    logprobs: Logprobs = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @classmethod
    def _null_says(cls) -> frozenset[str]:
        return frozenset({"max_tokens"})

    def sampling_params(self) -> SamplingParams:
        """As the chat's. Where the prompt is echoed with logprobs, it has them too."""
        if self.best_of not in (None, self.n):
            raise InvalidRequestError(
                f"best_of is {self.best_of}, but all of the n = {self.n} answers are returned, as good as "
                "they are; leave it out",
                param="best_of",
            )
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return self._params(
            max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=max(wanted, default=None)
        )

    def prompts(self) -> list[str | list[int]]:
        """The prompts; whether ids are the model's is not checked here."""
        prompts = self._as_prompts(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt has {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt"
            )
        if len(prompts) * self.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"n is {self.n}, for {len(prompts)} prompts, in all {len(prompts) * self.n} answers; at most "
                f"{MAX_CHOICES} are allowed",
                param="n",
            )
        return prompts

    @staticmethod
    def _as_prompts(prompt: Any) -> list[str | list[int]]:
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise InvalidRequestError(
                "prompt must be text, a list of texts, token ids, or a list of lists of these; and not empty",
                param="prompt",
            )
        kind = str if isinstance(prompt[0], str) else list
        if not isinstance(prompt[0], kind):
            return [prompt]  # of ids, or of what the engine refuses
        for index, item in enumerate(prompt):
            if not isinstance(item, kind):
                raise InvalidRequestError(
                    f"prompt[{index}] is a {type(item).__name__}, but prompt[0] is a {kind.__name__}; "
                    "prompts are all texts or all lists of token ids",
                    param="prompt",
                )
        return prompt


class TokenizeRequest(StrictModel):
    """POST /tokenize: of a prompt as completions take it, or of messages as chat does."""

    model: str | None = None
    prompt: Annotated[str, _within(minLength=1)] | None = None
    messages: Annotated[list[Message], _within(minItems=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], _within(items=_TOKEN_ID)]


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise InvalidRequestError(
            f"logit_bias has the key {key[:40]!r}; keys are token ids, such as '42'", param="logit_bias"
        )
    return int(key)
