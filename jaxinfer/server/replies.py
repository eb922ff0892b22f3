"""Sends an answer: the streaming and the whole reply fold the same stream of events.

A client that goes away cancels the handler, which leaves the event source, which aborts.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from aiohttp import web

from jaxinfer.outputs import OutputDelta, RequestOutput
from jaxinfer.server.answers import Answer
from jaxinfer.server.connection import connection_of
from jaxinfer.server.errors import ApiError, internal
from jaxinfer.server.events import Event, EventSource
from jaxinfer.server.sse import PATIENCE_S, EventStream, dumps
from jaxinfer.server.state import (
    CONFIG,
    ENGINE,
    LIFECYCLE,
    METRICS,
    REQUEST_ID,
    REQUEST_LOG,
)
from jaxinfer.server.threads import in_thread

_log = logging.getLogger(__name__)


async def reply(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Generates the answer and sends it.

    Raises:
      ApiError: nothing was sent yet, and the request failed.
    """
    connection = connection_of(request)
    with nullcontext() if connection is None else connection.answering(request):
        if answer.options.stream:
            return await _stream(request, answer)
        async with request.app[LIFECYCLE].running(request.app[CONFIG].request_timeout):
            return await _whole(request, answer)


def _events(request: web.Request, answer: Answer) -> EventSource:
    """Returns the answer's events; usage, metrics and the log line see each of them."""
    metrics = request.app[METRICS]
    timers = [
        metrics.generation(item.params, len(item.prompt_token_ids)) for item in answer.requests
    ]
    log = request[REQUEST_LOG]
    log["prompt_tokens"] = answer.usage.prompt_tokens
    log["finish_reason"] = "abort"

    def observe(prompt: int, delta: OutputDelta) -> None:
        timers[prompt].observe(delta)
        answer.usage.add(prompt, delta)
        log["completion_tokens"] = answer.usage.completion_tokens
        if delta.finish_reason is not None:
            log["finish_reason"] = delta.finish_reason

    return EventSource(request.app[ENGINE], answer.requests, observe)


async def _whole(request: web.Request, answer: Answer) -> web.Response:
    outputs = [
        RequestOutput.empty(item.request_id, None, item.prompt_token_ids, answer.n)
        for item in answer.requests
    ]
    async with _events(request, answer) as events:
        while (event := await events.next()) is not None:
            prompt, delta = event
            outputs[prompt].extend(delta)

    def body() -> str:
        choices = [
            answer.choice(prompt, completion, output.prompt_logprobs)
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        return dumps(answer.body(choices))

    # Scores of a long prompt are thousands of entries.
    is_large = answer.options.params.prompt_logprobs is not None
    text = await in_thread(request, body) if is_large else body()
    return web.Response(text=text, content_type="application/json")


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    stream = EventStream(request)
    try:
        async with (
            request.app[LIFECYCLE].running(request.app[CONFIG].request_timeout),
            _events(request, answer) as events,
        ):
            await _send_all(stream, answer, events)
    except ConnectionError:
        _log.info("request %s: the client is gone", request[REQUEST_ID])
    except ApiError as error:
        if not stream.is_open:
            raise
        await stream.fail(error.body)
    except Exception:
        if not stream.is_open:
            raise
        _log.exception("request %s failed while streaming", request[REQUEST_ID])
        await stream.fail(internal(request[REQUEST_ID]).body)
    return stream.response


async def _send_all(stream: EventStream, answer: Answer, events: EventSource) -> None:
    # Until the first event an error still gets its own status line.
    event = await _next_event(stream, events)
    await stream.open()
    for choice in answer.opening():
        await stream.send(answer.chunk(choice))
    while event is not None:
        for choice in answer.delta(*event):
            await stream.send(answer.chunk(choice))
        event = await _next_event(stream, events)
    if answer.options.include_usage:
        await stream.send(answer.usage_chunk())
    await stream.finish()


async def _next_event(stream: EventStream, events: EventSource) -> Event | None:
    while True:
        try:
            return await events.next(PATIENCE_S)
        except TimeoutError:
            await stream.idle()
