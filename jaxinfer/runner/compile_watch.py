"""Counts executables; while the engine steps there must be none."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from jaxinfer import _compat

logger = logging.getLogger(__name__)


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
        # jax keeps its listeners for ever: hold the watch weakly.
        reference = weakref.ref(self)

        def on_compile(seconds: float) -> None:
            watch = reference()
            if watch is not None:
                watch._count(seconds)

        _compat.on_backend_compile(on_compile)

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
