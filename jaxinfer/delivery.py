"""How what the engine thread made reaches those who wait for it, wherever they run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jaxinfer.outputs import OutputDelta

logger = logging.getLogger(__name__)

Batch = list[OutputDelta] | Exception
"""What one step added to one request, or why the engine did not take the request."""
Deliver = Callable[[Batch], None]


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A queue on an event loop, which other threads fill by calling it."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Batch]

    def __call__(self, batch: Batch) -> None:
        """Puts a batch into the queue soon."""
        self.loop.call_soon_threadsafe(self.queue.put_nowait, batch)


def deliver_all(batches: Iterable[tuple[str, Deliver, Batch]]) -> list[str]:
    """Delivers what one step added to many requests; returns those whose clients are gone.

    A loop is woken once for all its mailboxes: to wake it takes longer than to make a token's text.
    """
    gone = []
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[str, Mailbox, Batch]]] = {}
    for request_id, deliver, batch in batches:
        if isinstance(deliver, Mailbox):
            by_loop.setdefault(deliver.loop, []).append((request_id, deliver, batch))
        elif not call(deliver, batch):
            gone.append(request_id)
    for loop, letters in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, letters)
        except RuntimeError as error:
            _say_gone(error)
            gone += [request_id for request_id, _, _ in letters]
    return gone


def call(deliver: Deliver, batch: Batch) -> bool:
    """Calls back; returns whether anyone was there, so that the others' engine lives on."""
    try:
        deliver(batch)
    except Exception as error:
        _say_gone(error)
        return False
    return True


def _put_all(letters: Iterable[tuple[str, Mailbox, Batch]]) -> None:
    for _, mailbox, batch in letters:
        mailbox.queue.put_nowait(batch)


def _say_gone(error: Exception) -> None:
    # A RuntimeError is a loop that was closed while its task waited.
    level = logging.INFO if isinstance(error, RuntimeError) else logging.ERROR
    logger.log(level, "a request's client is gone: %s", error)
