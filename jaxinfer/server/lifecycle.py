"""Whether the server takes requests, and the deadline every running one has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.server.errors import ApiError, unavailable

_POLL_S = 0.05


class Lifecycle:
    """The state of the process between its first second and its last.

    Invariant: a request that generates is inside `running`, so that draining can wait for it and
    end it.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_cut = False
        self.is_draining = False
        self.load_error: BaseException | None = None
        self.load_ended = asyncio.Event()

    async def load(self) -> None:
        """Starts the engine; a failure is kept in `load_error`."""
        try:
            await self._engine.start()
        except Exception as error:
            self.load_error = error
        finally:
            self.load_ended.set()

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._deadlines)

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be served."""
        return self._engine.state == "ready" and not self.is_draining

    @property
    def is_dead(self) -> bool:
        """Whether no request will ever be served again."""
        return self._engine.state == "dead" or self.load_error is not None

    def check_ready(self) -> None:
        """Does nothing if a new request would be served.

        Raises:
          ApiError: 503; the engine is loading, draining or dead.
        """
        if self.is_dead:
            raise unavailable("the engine has stopped", retry_after_s=10, closes=True)
        if self.is_draining or self._engine.state == "draining":
            raise unavailable("the server is shutting down", retry_after_s=10, closes=True)
        if self._engine.state == "loading":
            raise unavailable("Loading model", retry_after_s=2)

    @asynccontextmanager
    async def running(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Bounds the work inside by the request timeout and by the end of draining.

        Raises:
          ApiError: 504 the timeout passed, 503 the server cannot wait longer.
        """
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                self._deadlines.add(deadline)
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            if self._is_cut:
                raise unavailable(
                    "the server is shutting down", retry_after_s=10, closes=True
                ) from None
            raise ApiError(
                504,
                f"the request did not finish within {timeout_s:g} s",
                kind="timeout_error",
                code="request_timeout",
            ) from None
        finally:
            self._deadlines.discard(deadline)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets running ones finish for `timeout_s`, then ends the rest."""
        self.is_draining = True
        await self._wait_until_idle(timeout_s)
        self._is_cut = True
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)
        await self._wait_until_idle(1.0)

    async def _wait_until_idle(self, timeout_s: float) -> None:
        end = asyncio.get_running_loop().time() + timeout_s
        while self._deadlines and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(_POLL_S)
