"""POST /tokenize and /detokenize: what a prompt costs, and what ids say."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from octavo.engine.async_engine import AsyncEngine
from octavo.errors import InvalidRequestError
from octavo.input.input_processor import InputProcessor
from octavo.server.openai.answers import check_model
from octavo.server.openai.error_responses import RESPONSES
from octavo.server.openai.protocol import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", responses=RESPONSES)
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """The ids that completions make of a prompt, or chat of messages."""
    engine: AsyncEngine = request.app.state.engine
    check_model(engine, body.model)
    ids = _encode(engine.inputs, body)
    return {"tokens": ids, "count": len(ids), "max_model_len": engine.info.max_model_len}


@router.post("/detokenize", responses=RESPONSES)
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of ids, special tokens included."""
    engine: AsyncEngine = request.app.state.engine
    check_model(engine, body.model)
    ids = engine.inputs.check_ids(body.tokens, param="tokens")
    return {"prompt": engine.inputs.tokenizer.decode(ids, skip_special_tokens=False)}


def _encode(inputs: InputProcessor, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give prompt or messages, and not both", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens is not None:
            raise InvalidRequestError(
                "add_special_tokens is for a prompt; messages get theirs from the chat template",
                param="add_special_tokens",
            )
        return inputs.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if name in body.model_fields_set:
            raise InvalidRequestError(
                f"{name} is for messages, and there is a prompt; leave it out", param=name
            )
    assert body.prompt is not None
    return inputs.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
