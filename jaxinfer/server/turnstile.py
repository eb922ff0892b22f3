"""A burst of requests goes in a few at a time, so that the event loop gets to everything else."""

from __future__ import annotations

import asyncio
from collections import deque

_AT_ONCE = 16


class Turnstile:
    """Lets so many requests begin in one turn of the event loop; the others wait for their turn.

    A thousand that came together would otherwise be parsed, and most of them refused, in one turn,
    and a health check would be answered after all of them.
    """

    def __init__(self, at_once: int = _AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0

    async def enter(self) -> None:
        """Returns when it is the caller's turn: in the order of calls."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self._num_begun < self._at_once:
            if not self._num_begun:
                loop.call_soon(self._next_turn)
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # else its client is gone
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
