"""What the OpenAI routes take and refuse.

Rule: a field is honoured, or on the short list of harmless ones that are accepted and ignored, or
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from octavo.errors import InvalidRequestError
from octavo.input.input_processor import ChatArguments
from octavo.sampling_params import MAX_LOGPROBS, SamplingParams

#: Accepted and without effect: they describe the caller, or ask for what is the case anyway.
IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})


def _as_list(value: Any) -> Any:
    """A text alone is one stop."""
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class ChatCompletionRequest(BaseModel):
    """POST /v1/chat/completions. Beyond OpenAI's fields: top_k, min_p, repetition_penalty, priority,
    stop_token_ids, ignore_eos, include_stop_str_in_output, add_generation_prompt, continue_final_message,
    chat_template_kwargs; and more stops than its four.

    A null is as good as no field. Nothing is converted: "0.5" is no number and 1 is no true.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    messages: list[dict[str, Any]]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    n: Literal[1] = 1
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    priority: int = 0
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: item for key, item in value.items() if key not in IGNORED_FIELDS and item is not None
            }
        return value

    def sampling_params(self) -> SamplingParams:
        """The engine's terms for what was asked; InvalidRequestError where they can't be met."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        limits = {self.max_completion_tokens, self.max_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequestError(
                f"max_completion_tokens is {self.max_completion_tokens}, but max_tokens, its old name, is "
                f"{self.max_tokens}; give one",
                param="max_tokens",
            )
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
            logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=limits.pop() if limits else None,
            stop=tuple(self.stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    def chat_arguments(self) -> ChatArguments:
        """What was asked of the chat template, which checks it."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit()):
        raise InvalidRequestError(
            f"logit_bias has the key {key[:40]!r}; keys are token ids, such as '42'", param="logit_bias"
        )
    return int(key)
