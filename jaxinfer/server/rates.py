"""How many requests came in each of the last seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 30


class RequestRate:
    """The mean rate of the last `WINDOW_S` whole seconds.

    Args:
      clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def count(self) -> None:
        """Counts a request that comes now."""
        second = int(self._clock())
        if self._counts and self._counts[-1][0] == second:
            second, before = self._counts.pop()
            self._counts.append((second, before + 1))
        else:
            self._counts.append((second, 1))

    def per_second(self) -> float:
        """Returns the rate; the second that is not over yet is not part of it."""
        now = int(self._clock())
        recent = (count for second, count in self._counts if now - WINDOW_S <= second < now)
        return sum(recent) / WINDOW_S
