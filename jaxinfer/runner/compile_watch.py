"""Counts executables; while the engine steps there must be none."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from jaxinfer import _compat

logger = logging.getLogger(__name__)


_lock = threading.Lock()
_watches: WeakSet[CompileWatch] = WeakSet()


@functools.cache
def _listen() -> None:
    """Has all watches told of compilations: jax keeps its listeners for ever, so there is one."""

    def on_compile(seconds: float) -> None:
        with _lock:
            watches = list(_watches)
        for watch in watches:
            watch._count(seconds)

    _compat.on_backend_compile(on_compile)


class CompileWatch:
    """Counts the executables of this process, and those that appear inside a step.

    Attributes:
      num_compiles: executables compiled, or loaded from the persistent cache, in all.
      num_after_warmup: those that appeared inside a step.
      seconds: time they all took.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.num_after_warmup = 0
        self.seconds = 0.0
        self._step_thread: int | None = None
        _listen()
        with _lock:
            _watches.add(self)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, on this thread, a compilation is a fault: it is logged and counted."""
        self._step_thread = threading.get_ident()
        try:
            yield
        finally:
            self._step_thread = None

    def _count(self, seconds: float) -> None:
        self.num_compiles += 1
        self.seconds += seconds
        if threading.get_ident() == self._step_thread:
            self.num_after_warmup += 1
            logger.warning("XLA compiled a program inside a step (%.2f s): report this", seconds)
