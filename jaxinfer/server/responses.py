"""POST /v1/responses: OpenAI's newer form of a chat, without a store of past ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxinfer.server.errors import ApiError
from jaxinfer.server.handlers import chat_answer
from jaxinfer.server.replies import reply
from jaxinfer.server.responses_answer import ResponsesAnswer
from jaxinfer.server.responses_protocol import ResponsesRequest, parse_responses, renamed
from jaxinfer.server.routing import read_call
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import CONFIG


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: an answer as a list of items."""
    config = request.app[CONFIG]

    def parse(body: Mapping[str, Any], model: ServedModel) -> ResponsesRequest:
        defaults = model.engine.default_params
        return parse_responses(body, defaults=defaults, vocab_size=model.vocab_size, config=config)

    model, call = await read_call(request, parse)
    make = functools.partial(ResponsesAnswer, repeated=call.repeated)
    try:
        return await reply(request, await chat_answer(request, model, call.chat, make))
    except ApiError as error:
        raise renamed(error, call.sources) from None
