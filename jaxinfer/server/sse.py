"""JSON as it goes out: whole, or as server-sent events, with comments while nothing is produced."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from aiohttp import web

from jaxinfer.server.connection import connection_of

PING_INTERVAL_S = 15.0
PATIENCE_S = 1.0
"""How long to wait for something to send before calling `EventStream.idle`."""
_LAST_WORDS_S = 1.0
# Clients that split lines the way str.splitlines does would cut a payload at these.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumps(payload: Any) -> str:
    """Returns JSON on one line, by anyone's idea of a line."""
    text = _encode(payload)
    return text if text.isascii() else text.translate(_LINE_BREAKS)


def json_response(payload: Any, **options: Any) -> web.Response:
    """Returns a whole reply; `options` are of aiohttp's Response."""
    return web.json_response(payload, dumps=dumps, **options)


class EventStream:
    """A response of server-sent events.

    Args:
      is_named: an `event:` line with the payload's `type` comes before each `data:` line, and the
        end is not announced.
    """

    def __init__(self, request: web.Request, *, is_named: bool = False) -> None:
        self._request = request
        self._is_named = is_named
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._idle_s = 0.0

    @property
    def response(self) -> web.StreamResponse:
        """The response, for the handler to return."""
        return self._response

    @property
    def is_open(self) -> bool:
        """Whether the status line is out, so that errors can only be events."""
        return self._response.prepared

    async def open(self) -> None:
        """Sends the headers, if that has not happened yet."""
        if not self.is_open:
            await self._response.prepare(self._request)

    async def send(self, payload: Any) -> None:
        """Sends one event."""
        self._idle_s = 0.0
        name = f"event: {payload['type']}\n" if self._is_named else ""
        await self._response.write(f"{name}data: {dumps(payload)}\n\n".encode())

    async def idle(self) -> None:
        """Tells the client that the answer is still coming, if it is time to.

        A client that closed its side may be gone: writing is the only way to learn it.
        """
        self._idle_s += PATIENCE_S
        connection = connection_of(self._request)
        must_check = connection is not None and connection.is_half_closed and self.is_open
        if self._idle_s >= PING_INTERVAL_S or must_check:
            await self.open()
            self._idle_s = 0.0
            # The answer may just have ended; who is gone is noticed by aiohttp, which ends that.
            with suppress(ConnectionError, RuntimeError):
                await self._response.write(b": ping\n\n")

    async def finish(self) -> None:
        """Ends a complete answer."""
        if not self._is_named:
            await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()

    async def fail(self, body: Any) -> None:
        """Ends a broken answer with an error event; never waits long for a slow client."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.send(body)
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            self._response.force_close()
