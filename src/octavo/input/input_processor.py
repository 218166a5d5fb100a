"""Makes an `EngineRequest` of what a caller sent. Strings stop here.

Rule: what leaves is complete and can be served: ids within the vocabulary, room for at least one
token, max_tokens and seed filled in. Everything else is refused with the numbers that say why.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.input.chat_template import ChatTemplate
from octavo.input.tokenizer import Tokenizer
from octavo.messages import EngineRequest
from octavo.sampling_params import SamplingParams

MAX_CACHE_SALT = 256
ROLES = ("system", "developer", "user", "assistant", "tool")
_SEED_BITS = 63


class ChatArguments(TypedDict, total=False):
    """How a conversation is rendered, beside its messages: arguments of `ChatTemplate.render`."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    template: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class InputProcessor:
    """Tokenises, validates and completes requests for one model.

    max_model_len: positions a request may use, prompt and output together. vocab_size: rows of the
    model's embedding, which may be more than the tokenizer's tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_model_len: int, vocab_size: int
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    def process(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        cache_salt: str = "",
        clamp: bool = False,
    ) -> EngineRequest:
        """The request for a prompt given as text or as token ids, which are taken as they are.

        cache_salt: only requests of the same salt share KV blocks. clamp: lower a max_tokens that does not
        fit the context instead of refusing it. Raises InvalidRequestError, and ContextLengthError where the
        context is too small.
        """
        return self._complete(
            self.encode(prompt),
            params,
            "prompt",
            request_id=request_id,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            clamp=clamp,
        )

    def process_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        cache_salt: str = "",
        clamp: bool = True,
        **chat: Unpack[ChatArguments],
    ) -> EngineRequest:
        """The request for a conversation; see `process` and `encode_chat`."""
        return self._complete(
            self.encode_chat(messages, **chat),
            params,
            "messages",
            request_id=request_id,
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            clamp=clamp,
        )

    def encode(self, prompt: str | Sequence[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, of which there may be none. Errors as `process`.

        add_special_tokens: begin a text with BOS where the model wants one.
        """
        if isinstance(prompt, str):
            return self._encode(prompt, param="prompt", add_special_tokens=add_special_tokens)
        return self.check_ids(prompt, param="prompt")

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **chat: Unpack[ChatArguments]) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template.

        Templates write their own special tokens, so the tokenizer adds none. But the prompt begins with one
        BOS where the model wants one and its template left it out, and where the template wrote several.
        Errors as `process`.
        """
        if self.template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it can't answer a conversation. Completions work; to "
                "chat, start the server with --chat-template FILE",
                param="messages",
            )
        check_messages(messages)
        text = self.template.render(messages, **chat)
        return self._with_one_bos(self._encode(text, param="messages", add_special_tokens=False))

    def _encode(self, text: str, *, param: str, add_special_tokens: bool) -> list[int]:
        # A text this long can't fit whatever its tokens are; tokenising it would only cost time.
        at_least = self.tokenizer.min_tokens(text)
        if at_least >= self.max_model_len:
            raise self._prompt_too_long(f"at least {at_least}", param)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), param=param) from error

    def _with_one_bos(self, prompt_ids: list[int]) -> list[int]:
        bos_id = self.tokenizer.bos_id
        if bos_id is None:
            return prompt_ids
        written = next((i for i, token in enumerate(prompt_ids) if token != bos_id), len(prompt_ids))
        wanted = written > 0 or self.tokenizer.adds_bos
        return [bos_id] * wanted + prompt_ids[written:]

    def check_ids(self, ids: Sequence[int], *, param: str) -> list[int]:
        """A copy of token ids that the model has; InvalidRequestError for anything else."""
        if isinstance(ids, bytes | bytearray | memoryview) or not isinstance(ids, Sequence):
            raise InvalidRequestError(
                f"the {param} is a {type(ids).__name__}; it must be text or a list of token ids", param=param
            )
        for position, token_id in enumerate(ids):
            if type(token_id) is not int:
                raise InvalidRequestError(
                    f"{param}[{position}] is {_show(token_id)}, a {type(token_id).__name__}; token ids "
                    "are integers",
                    param=param,
                )
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}[{position}] is {_show(token_id)}, but the model's tokens are "
                    f"0..{self.vocab_size - 1}",
                    param=param,
                )
        return list(ids)

    def _complete(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        param: str,
        *,
        request_id: str,
        arrival: float,
        priority: int,
        cache_salt: str,
        clamp: bool,
    ) -> EngineRequest:
        """Check what is left to check and fill in what was left open."""
        params.check_vocabulary(self.vocab_size)
        _check_salt(cache_salt)
        if not prompt_ids:
            raise InvalidRequestError("the prompt has no tokens; send at least one", param=param)
        room = self.max_model_len - len(prompt_ids)
        if room < (params.max_tokens != 0):
            raise self._prompt_too_long(str(len(prompt_ids)), param)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            if not clamp:
                raise ContextLengthError(
                    f"the prompt has {len(prompt_ids)} tokens and max_tokens is {max_tokens}, in all "
                    f"{len(prompt_ids) + max_tokens}; the context holds {self.max_model_len}. Lower "
                    f"max_tokens to at most {room}, or shorten the prompt",
                    param="max_tokens",
                )
            max_tokens = room
        params.check_min_tokens(max_tokens)
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        return EngineRequest(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed),
            eos_ids=() if params.ignore_eos else self.tokenizer.eos_ids,
            priority=priority,
            arrival=arrival,
            cache_salt=cache_salt,
        )

    def _prompt_too_long(self, num_tokens: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"the prompt has {num_tokens} tokens; the context holds {self.max_model_len}, one of which the "
            "answer needs. Shorten the prompt",
            param=param,
        )


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError unless this is a conversation: roles we know, and text."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message", param="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"{where} is a {type(message).__name__}; it must be an object with role and content",
                param="messages",
            )
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(
                f"{where}.role is {_show(role)}; it must be one of {', '.join(ROLES)}", param="messages"
            )
        content = message.get("content")
        if content is None and role == "assistant":
            continue  # an answer that was nothing but tool calls
        if not isinstance(content, str | list | tuple):
            raise InvalidRequestError(
                f"{where}.content is a {type(content).__name__}; it must be text or a list of text parts",
                param="messages",
            )


def _check_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequestError(
            f"cache_salt has {len(cache_salt)} characters; at most {MAX_CACHE_SALT} are allowed",
            param="cache_salt",
        )
    if any("\ud800" <= character <= "\udfff" for character in cache_salt):
        raise InvalidRequestError(
            "cache_salt has a lone surrogate, which no text has; send whole characters", param="cache_salt"
        )


def _show(value: object) -> str:
    """A caller's value, short enough to quote."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:80]
