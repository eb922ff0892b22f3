"""Sends an answer: the streaming and the whole reply fold the same stream of events.

A client that goes away cancels the handler, which leaves the event source, which aborts.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from aiohttp import web

from jaxinfer.outputs import OutputDelta
from jaxinfer.server.answers import Answer, WholeAnswer
from jaxinfer.server.connection import connection_of
from jaxinfer.server.errors import ApiError, internal
from jaxinfer.server.events import EventSource
from jaxinfer.server.sse import PATIENCE_S, EventStream
from jaxinfer.server.state import (
    CONFIG,
    METRICS,
    MODEL,
    REQUEST_ID,
    REQUEST_LOG,
)
from jaxinfer.server.threads import in_thread

_log = logging.getLogger(__name__)


async def reply(request: web.Request, answer: WholeAnswer) -> web.StreamResponse:
    """Generates the answer and sends it.

    Raises:
      ApiError: nothing was sent yet, and the request failed.
    """
    connection = connection_of(request)
    with nullcontext() if connection is None else connection.answering(request):
        if isinstance(answer, Answer) and answer.options.stream:
            return await _stream(request, answer)
        try:
            async with request[MODEL].running(request.app[CONFIG].request_timeout):
                return await _whole(request, answer)
        except ApiError as error:
            _note_failure(request, error)
            raise


def _note_failure(request: web.Request, error: ApiError) -> None:
    """Tells what could not be answered from requests that were ended in their log line."""
    if error.status in (400, 500):
        request[REQUEST_LOG]["finish_reason"] = "error"


def _events(
    request: web.Request, answer: WholeAnswer, on_idle: Callable[[], Awaitable[None]] | None = None
) -> EventSource:
    """Returns the answer's events; usage, metrics and the log line see each of them."""
    metrics, model = request.app[METRICS], request[MODEL]
    timers = [
        metrics.generation(model.name, item.params, len(item.prompt_token_ids))
        for item in answer.requests
    ]
    log = request[REQUEST_LOG]
    log["prompt_tokens"] = answer.usage.prompt_tokens
    log["finish_reason"] = "abort"

    def observe(prompt: int, delta: OutputDelta) -> None:
        timer = timers[prompt]
        timer.observe(delta)
        answer.usage.add(prompt, delta)
        log["completion_tokens"] = answer.usage.completion_tokens
        if timer.first_token_s is not None and "ttft_s" not in log:
            log["ttft_s"] = round(timer.first_token_s, 4)
        if delta.finish_reason is not None:
            log["finish_reason"] = delta.finish_reason
            log["cached_tokens"] = answer.usage.cached_tokens
            if timer.queue_s is not None and "queue_s" not in log:
                log["queue_s"] = round(timer.queue_s, 4)

    return EventSource(
        model.engine, answer.requests, observe, answer.most_at_once, on_idle, PATIENCE_S
    )


async def _whole(request: web.Request, answer: WholeAnswer) -> web.Response:
    async with _events(request, answer) as events:
        while (event := await events.next()) is not None:
            answer.take(*event)
    body = await in_thread(request, answer.text) if answer.is_large else answer.text()
    return web.Response(text=body, content_type="application/json")


async def _stream(request: web.Request, answer: Answer) -> web.StreamResponse:
    stream = EventStream(request, is_named=answer.names_events)
    try:
        async with (
            request[MODEL].running(request.app[CONFIG].request_timeout),
            _events(request, answer, stream.idle) as events,
        ):
            await _send_all(stream, answer, events)
    except ConnectionError:
        _log.info("request %s: the client is gone", request[REQUEST_ID])
    except ApiError as error:
        _note_failure(request, error)
        if not stream.is_open:
            raise
        await stream.fail(answer.failure(error.body))
    except Exception:
        if not stream.is_open:
            raise
        _log.exception("request %s failed while streaming", request[REQUEST_ID])
        await stream.fail(answer.failure(internal(request[REQUEST_ID]).body))
    return stream.response


async def _send_all(stream: EventStream, answer: Answer, events: EventSource) -> None:
    # Until the first event an error still gets its own status line.
    event = await events.next()
    await stream.open()
    for choice in answer.opening():
        await stream.send(answer.chunk(choice))
    while event is not None:
        for choice in answer.delta(*event):
            await stream.send(answer.chunk(choice))
        event = await events.next()
    for payload in answer.closing():
        await stream.send(payload)
    await stream.finish()
