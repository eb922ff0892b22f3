"""Notices that an engine thread hangs in a step, or is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MOST_POLL_S = 1.0


class Watchdog:
    """Looks after one thread from one of its own.

    Args:
      timeout_s: the longest a step may take; 0 for no limit.
      give_up: called once, on the watchdog's thread, with what is wrong; nothing is watched after.
    """

    def __init__(self, timeout_s: float, give_up: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._step_began: float | None = None
        self._watched: threading.Thread
        self._thread = threading.Thread(target=self._watch, name="jaxinfer-watchdog", daemon=True)

    def start(self, watched: threading.Thread) -> None:
        """Begins to watch a thread that runs."""
        self._watched = watched
        self._thread.start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, the watched thread is in a step."""
        self._step_began = time.monotonic()
        try:
            yield
        finally:
            self._step_began = None

    def wait(self) -> None:
        """Returns when the thread has ended or was given up."""
        self._thread.join()

    def _watch(self) -> None:
        poll_s = min(_MOST_POLL_S, self._timeout_s / 4) if self._timeout_s else None
        while True:
            self._watched.join(poll_s)
            if not self._watched.is_alive():
                return
            began = self._step_began
            if began is not None and time.monotonic() - began > self._timeout_s:
                self._give_up(f"a step did not end within {self._timeout_s:g} s")
                return
