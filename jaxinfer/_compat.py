"""The one place that knows how jax 0.10 to 0.12 differ, or which of their details we lean on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.experimental.compilation_cache import compilation_cache

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""Recorded once per executable, whether XLA compiled it or the persistent cache held it."""


def on_backend_compile(callback: Callable[[float], None]) -> None:
    """Calls back with the seconds of every executable that is compiled or loaded from the cache."""

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _BACKEND_COMPILE:
            callback(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Inside, every program is compiled anew.

    At its first compilation jax remembers whether it has a cache, and must be told to ask again.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
