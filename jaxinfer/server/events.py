"""One stream of events for one HTTP request, whatever its number of prompts and completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Self

from jaxinfer.async_engine import AsyncEngine, EngineDeadError, EngineRequest, QueueFullError
from jaxinfer.outputs import OutputDelta
from jaxinfer.request import UNSATISFIABLE
from jaxinfer.server.errors import ApiError, internal, invalid, queue_full, unavailable

_log = logging.getLogger(__name__)

Event = tuple[int, OutputDelta]


class EventSource:
    """The deltas of several engine requests as one stream of (request number, delta).

    Leaving the context aborts what is unfinished.

    Args:
      engine: takes the requests.
      requests: of one answer.
      observe: sees every event just before `next` returns it.
      most_at_once: requests the engine is given at a time.
      on_idle: awaited while nothing comes, every `patience_s` from the second on.
      patience_s: seconds.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        requests: Sequence[EngineRequest],
        observe: Callable[[int, OutputDelta], None],
        most_at_once: int | None = None,
        on_idle: Callable[[], Awaitable[None]] | None = None,
        patience_s: float = 1.0,
    ) -> None:
        self._engine = engine
        self._turns = asyncio.Semaphore(most_at_once or max(1, len(requests)))
        self._observe = observe
        self._requests = requests
        self._queue: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()
        self._pumps: list[asyncio.Task[None]] = []
        self._num_open = len(requests)
        self._on_idle = on_idle
        self._patience_s = patience_s
        self._ticker: asyncio.TimerHandle | None = None
        self._saying: asyncio.Task[None] | None = None
        self._num_events = 0
        self._num_at_tick = -1

    async def __aenter__(self) -> Self:
        self._pumps = [
            asyncio.create_task(self._pump(number, request))
            for number, request in enumerate(self._requests)
        ]
        if self._on_idle is not None:
            self._tick()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._saying is not None:
            self._saying.cancel()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def _tick(self) -> None:
        """One timer for a whole stream: one for every token would cost more than its text."""
        is_idle = self._num_at_tick == self._num_events
        if is_idle and self._on_idle is not None and (self._saying is None or self._saying.done()):
            self._saying = asyncio.ensure_future(self._on_idle())
        self._num_at_tick = self._num_events
        self._ticker = asyncio.get_running_loop().call_later(self._patience_s, self._tick)

    async def next(self) -> Event | None:
        """Returns the next event, or None after the last.

        Raises:
          ApiError: the request failed.
        """
        while self._num_open:
            event = await self._queue.get()
            if isinstance(event, ApiError):
                raise event
            if event is not None:
                self._num_events += 1
                self._observe(*event)
                return event
            self._num_open -= 1
        return None

    async def _pump(self, number: int, request: EngineRequest) -> None:
        try:
            async with self._turns, aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    self._queue.put_nowait(self._failure(delta) or (number, delta))
            self._queue.put_nowait(None)
        except QueueFullError as error:
            self._queue.put_nowait(queue_full(str(error) or "the queue is full"))
        except EngineDeadError:
            self._queue.put_nowait(_engine_stopped())
        except Exception:
            _log.exception("request %s failed", request.request_id)
            self._queue.put_nowait(internal(request.request_id))

    def _failure(self, delta: OutputDelta) -> ApiError | None:
        if delta.finish_reason == "abort" or (
            delta.finish_reason == "error" and self._engine.state != "ready"
        ):
            return _engine_stopped()
        if delta.error_param is not None:
            _log.info("request %s cannot go on: %s", delta.request_id, delta.error)
            return invalid(delta.error_param, delta.error or "", UNSATISFIABLE)
        if delta.finish_reason == "error":
            _log.error("request %s failed: %s", delta.request_id, delta.error)
            return internal(delta.request_id)
        return None


def _engine_stopped() -> ApiError:
    return unavailable("the engine stopped before the answer was complete", retry_after_s=10)
