"""POST /v1/responses: OpenAI's newer form of a chat, without a store of past ones."""

from __future__ import annotations

import functools

from aiohttp import web

from jaxinfer.server.errors import ApiError
from jaxinfer.server.handlers import chat_answer
from jaxinfer.server.replies import reply
from jaxinfer.server.responses_answer import ResponsesAnswer
from jaxinfer.server.responses_protocol import parse_responses, renamed
from jaxinfer.server.routing import read_generation


async def responses(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: an answer as a list of items."""
    model, call = await read_generation(request, parse_responses)
    make = functools.partial(ResponsesAnswer, repeated=call.repeated)
    try:
        return await reply(request, await chat_answer(request, model, call.chat, make))
    except ApiError as error:
        raise renamed(error, call.sources) from None
