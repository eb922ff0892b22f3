"""Work that would block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from jaxinfer.server.errors import invalid
from jaxinfer.server.state import EXECUTOR

TIMEOUT_S = 20.0
"""How long rendering or tokenizing one request may take."""

ResultT = TypeVar("ResultT")


async def in_thread(request: web.Request, work: Callable[[], ResultT]) -> ResultT:
    """Runs what would block the event loop.

    Raises:
      ApiError: 400; it took too long.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await loop.run_in_executor(request.app[EXECUTOR], work)
    except TimeoutError:
        message = f"preparing the prompt took more than {TIMEOUT_S:g} s; shorten it"
        raise invalid(None, message) from None
