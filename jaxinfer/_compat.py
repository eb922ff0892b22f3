"""The one place that knows how jax 0.10 to 0.12 differ, or which of their details we lean on."""

from __future__ import annotations

from collections.abc import Callable

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""Recorded once per executable, whether XLA compiled it or the persistent cache held it."""


def on_backend_compile(callback: Callable[[float], None]) -> None:
    """Calls back with the seconds of every executable that is compiled or loaded from the cache."""

    def listener(event: str, duration_secs: float, **_: str | int) -> None:
        if event == _BACKEND_COMPILE:
            callback(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listener)
