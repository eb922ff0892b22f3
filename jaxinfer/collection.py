"""Python's garbage collection, which start-up does without: what it makes lives on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collects nothing inside: imports and tracing make objects by the 100,000, and keep them.

    Looking at those again and again is a sixth of both. What a caller had switched off stays off.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_unused() -> None:
    """Frees what nothing refers to any more; what stays is not looked at again."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
