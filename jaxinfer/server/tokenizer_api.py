"""Endpoints about the model's tokenizer: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxinfer.server.chat_prompt import prepare_chat
from jaxinfer.server.errors import invalid, missing, shown
from jaxinfer.server.fields import Field, array, boolean, integer, read_object, refused, string
from jaxinfer.server.protocol_chat import CHAT, ChatRequest, parse_chat
from jaxinfer.server.routing import model_of, read_call
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.sse import json_response
from jaxinfer.server.state import CONFIG
from jaxinfer.server.threads import in_thread

_CHAT_NAMES = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
# vLLM's names, for texts and for chats, then llama.cpp's.
TOKENIZE = {
    "model": Field(string()),
    "prompt": Field(string()),
    **{name: CHAT[name] for name in _CHAT_NAMES},
    "return_token_strs": Field(boolean),
    "content": Field(string()),
    "add_special": Field(boolean),
    "parse_special": refused(True, because="must be true: texts of special tokens become those"),
    "with_pieces": Field(boolean),
}
DETOKENIZE = {"model": Field(string()), "tokens": Field(array(integer(0)))}


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: vLLM's request or llama.cpp's, answered with the union of their replies."""
    config = request.app[CONFIG]

    def parse(
        body: Mapping[str, Any], model: ServedModel
    ) -> tuple[dict[str, Any], ChatRequest | None]:
        values = read_object(body, TOKENIZE, strict=config.strict_params)
        if "messages" not in values:
            return values, None
        chat = {name: body[name] for name in _CHAT_NAMES if name in body}
        return values, parse_chat(chat, defaults={}, vocab_size=model.vocab_size, config=config)

    model, (values, chat) = await read_call(request, parse)
    engine = model.engine
    text: str = values.get("prompt", values.get("content", ""))
    if ("prompt" in values or "content" in values) == (chat is not None):
        message = "one of prompt and messages is required, and not both"
        raise invalid("prompt", message, "missing_required_parameter")
    # Left to itself, vLLM adds special tokens and llama.cpp does not.
    default = values.get("add_special", "prompt" in values)
    adds_special_tokens = values.get("add_special_tokens", default)

    def encode() -> list[int]:
        if chat is not None:
            return prepare_chat(engine.chat_template, engine.tokenizer, chat).ids
        return engine.tokenizer.encode(text, add_special_tokens=adds_special_tokens)

    ids = await in_thread(request, encode)
    reply: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": engine.max_model_len,
    }
    if values.get("return_token_strs", False):
        reply["token_strs"] = [engine.tokenizer.token_text(token_id) for token_id in ids]
    if values.get("with_pieces", False):
        reply["tokens"] = [
            {"id": token_id, "piece": _piece(engine.tokenizer.token_bytes(token_id))}
            for token_id in ids
        ]
    return json_response(reply)


def _piece(data: bytes) -> str | list[int]:
    """Returns a token as llama.cpp does: bytes that are no whole characters as numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, under vLLM's name and llama.cpp's."""
    is_strict = request.app[CONFIG].strict_params
    model, values = await read_call(
        request, lambda body, _: read_object(body, DETOKENIZE, strict=is_strict)
    )
    tokenizer = model.engine.tokenizer
    ids = values.get("tokens")
    if ids is None:
        raise missing("tokens")
    if ids and max(ids) >= tokenizer.vocab_size:
        message = f"tokens holds {shown(max(ids))}, but ids end at {tokenizer.vocab_size - 1}"
        raise invalid("tokens", message)
    text = await in_thread(request, lambda: tokenizer.decode(ids, skip_special_tokens=False))
    return json_response({"prompt": text, "content": text})


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info?model=NAME: what a client needs to render chats itself."""
    tokenizer = model_of(request, request.query.get("model")).engine.tokenizer
    body = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    return json_response(body)
