"""Gives memory that was freed back to the system: what compilers leave behind, glibc keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any


def trim() -> None:
    """Returns free pages of the C heap to the system; does nothing where that is not glibc's."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _malloc_trim() -> Callable[[int], Any] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
