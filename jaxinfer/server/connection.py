"""The TCP side of a request: a client may close its sending half and still wait for the answer.

aiohttp takes a client's FIN for a disconnect. Here the answer goes on, and whether anybody still
listens is found out by sending something harmless.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import EMPTY_PAYLOAD, HttpVersion11, StreamReader, web

from jaxinfer.server.errors import ApiError

_log = logging.getLogger(__name__)

_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
_ACCEPTED_AT_ONCE = 16
"""Connections accepted in one turn of the event loop: everything else waits meanwhile."""
_GRACE_S = 0.05
_FIRST_PROBE_S = 0.1
_LAST_PROBE_S = 15.0
# An interim response, which HTTP/1.1 clients must skip; the kernel of a client that is gone
# answers it with a reset, at which the next one fails.
_PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"


class Connection(web.RequestHandler):
    """A client's connection that survives a half-close while a request is being answered."""

    def __init__(self, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self.is_half_closed = False
        self._can_probe = False
        self._probing: asyncio.Task[None] | None = None
        self._newest_body: StreamReader = EMPTY_PAYLOAD

    @contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Marks the time from a complete request to its answer: this client may be probed."""
        self._can_probe = request.version >= HttpVersion11
        if self.is_half_closed:
            asyncio.get_running_loop().call_later(_GRACE_S, self._start_probing)
        try:
            yield
        finally:
            self._can_probe = False

    def response_started(self) -> None:
        """Ends probing: from here on the bytes on the wire are the answer's."""
        self._can_probe = False

    def data_received(self, data: bytes) -> None:
        """Keeps the body of the newest request, as aiohttp hands requests on."""
        super().data_received(data)
        if self._messages:
            self._newest_body = self._messages[-1][1]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the transport open as long as a complete request waits for its answer."""
        if self.ssl_context is not None:
            return False  # TLS has no half-closed connections
        if not self.is_half_closed:
            self.is_half_closed = True
            asyncio.get_running_loop().call_later(_GRACE_S, self._after_eof)
        return True

    def _after_eof(self) -> None:
        # Asked of the connection, not of the handler: on a loaded machine a complete request may
        # take longer to reach its handler than any grace one would give it.
        if self.transport is None:
            return
        is_idle = self._waiter is not None and not self._messages
        if is_idle or not self._newest_body.is_eof():
            self.transport.close()
        elif self._messages:  # pipelined: each has its turn before the connection closes
            asyncio.get_running_loop().call_later(_GRACE_S, self._after_eof)
        else:
            self.close()
            self._start_probing()

    def _start_probing(self) -> None:
        if self._can_probe and (self._probing is None or self._probing.done()):
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        pause_s = _FIRST_PROBE_S
        while self._can_probe and self.transport is not None:
            self.transport.write(_PROBE)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PROBE_S)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancels the handler, as aiohttp does."""
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers what never reached a handler with an error of OpenAI's shape."""
        if status >= 500:
            _log.error("a request from %s failed", request.remote, exc_info=exc)
            error = ApiError(status, "internal error", kind="server_error", code="internal_error")
        else:
            _log.info("refused a malformed request from %s: %s", request.remote, type(exc).__name__)
            error = ApiError(status, "the request is not valid HTTP")
        response = web.json_response(error.body, status=status)
        response.force_close()
        return response


def connection_of(request: web.Request) -> Connection | None:
    """Returns the connection a request came by; None if the server was not made by `listen`."""
    protocol = request.protocol
    return protocol if isinstance(protocol, Connection) else None


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    uds: str | None = None,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> asyncio.Server:
    """Binds the address, without accepting yet: `accept` begins with it, once `runner` is set up.

    Args:
      runner: of the application.
      host, port: the address; IPv6 too.
      uds: path of a Unix socket, instead of both.
      tls: for HTTPS.
      options: of aiohttp's connections.

    Raises:
      OSError: the address cannot be had.
    """
    loop = asyncio.get_running_loop()

    def connect() -> Connection:
        assert runner.server is not None
        return Connection(runner.server, loop=loop, **options)

    if uds is not None:
        return await loop.create_unix_server(
            connect, uds, ssl=tls, backlog=_ACCEPTED_AT_ONCE, start_serving=False
        )
    return await loop.create_server(
        connect,
        host,
        port,
        ssl=tls,
        backlog=_ACCEPTED_AT_ONCE,
        reuse_address=True,
        start_serving=False,
    )


async def accept(server: asyncio.Server) -> None:
    """Begins to accept connections, few at a time, while the kernel keeps many."""
    await server.start_serving()
    for listener in server.sockets:
        # asyncio has one number for both; a socket may be told again how many wait at most.
        with socket.socket(fileno=os.dup(listener.fileno())) as same:
            same.listen(_BACKLOG)
