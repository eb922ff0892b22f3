"""Endpoints about the model's tokenizer: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxinfer.server.errors import invalid, shown
from jaxinfer.server.fields import Field, array, boolean, integer, read_object, string
from jaxinfer.server.json_body import read_body
from jaxinfer.server.served_model import served_name
from jaxinfer.server.sse import dumps
from jaxinfer.server.state import CONFIG, ENGINE, EXECUTOR, LIFECYCLE
from jaxinfer.server.threads import in_thread

# vLLM's names, then llama.cpp's.
_TOKENIZE = {
    "model": Field(string()),
    "prompt": Field(string()),
    "add_special_tokens": Field(boolean),
    "return_token_strs": Field(boolean),
    "content": Field(string()),
    "add_special": Field(boolean),
    "with_pieces": Field(boolean),
}
_DETOKENIZE = {"model": Field(string()), "tokens": Field(array(integer(0)))}


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: vLLM's request or llama.cpp's, answered with the union of their replies."""
    values = await _read(request, _TOKENIZE)
    engine = request.app[ENGINE]
    text = values.get("prompt", values.get("content"))
    if text is None:
        raise invalid("prompt", "prompt is required", "missing_required_parameter")
    # Left to itself, vLLM adds special tokens and llama.cpp does not.
    default = values.get("add_special", "prompt" in values)
    adds_special_tokens = values.get("add_special_tokens", default)
    ids = await in_thread(
        request, lambda: engine.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    )
    reply: dict[str, Any] = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": engine.max_model_len,
    }
    pieces = [engine.tokenizer.token_text(token_id) for token_id in ids]
    if values.get("return_token_strs", False):
        reply["token_strs"] = pieces
    if values.get("with_pieces", False):
        named = zip(ids, pieces, strict=True)
        reply["tokens"] = [{"id": token_id, "piece": piece} for token_id, piece in named]
    return web.json_response(reply, dumps=dumps)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, under vLLM's name and llama.cpp's."""
    values = await _read(request, _DETOKENIZE)
    tokenizer = request.app[ENGINE].tokenizer
    ids = values.get("tokens")
    if ids is None:
        raise invalid("tokens", "tokens is required", "missing_required_parameter")
    if ids and max(ids) >= tokenizer.vocab_size:
        message = f"tokens holds {shown(max(ids))}, but ids end at {tokenizer.vocab_size - 1}"
        raise invalid("tokens", message)
    text = await in_thread(request, lambda: tokenizer.decode(ids, skip_special_tokens=False))
    return web.json_response({"prompt": text, "content": text}, dumps=dumps)


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: what a client needs to render chats itself."""
    request.app[LIFECYCLE].check_ready()
    tokenizer = request.app[ENGINE].tokenizer
    body = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    return web.json_response(body, dumps=dumps)


async def _read(request: web.Request, table: Mapping[str, Field]) -> dict[str, Any]:
    app = request.app
    app[LIFECYCLE].check_ready()
    is_strict = app[CONFIG].strict_params
    values = await read_body(
        request, app[EXECUTOR], lambda body: read_object(body, table, strict=is_strict)
    )
    served_name(app, values.get("model"))
    return values
