"""A text that is still coming, read by generators.

A reader is a generator: where it needs more text it yields None and is resumed when there is more,
so that it is written as if the whole text lay before it. Besides None it yields events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from jaxinfer.text.tool_calls.events import CallDelta, Event

ResultT = TypeVar("ResultT")
Reading = Generator[Event | None, None, ResultT]

MAX_UNDECIDED = 2**16
"""Characters that are held back at most while they may be a call; beyond, they are none."""

_SPACE = re.compile(r"[ \t\r\n]*")


class NotACall(Exception):
    """What was read since the last `commit` is text that only looked like a call."""


class Source:
    """The text so far and how far it is read.

    Attributes:
      text: what is not used up yet.
      pos: where in it the reader is.
      is_complete: whether no more text comes.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_complete = False
        self._mark = 0  # what follows may still be given back

    def push(self, text: str) -> None:
        """Appends text and forgets what is used up: readers keep no position but `pos`."""
        self.text = self.text[self._mark :] + text
        self.pos -= self._mark
        self._mark = 0

    def commit(self) -> None:
        """Uses up everything read.

        Raises:
          NotACall: it is too long.
        """
        if self.pos - self._mark > MAX_UNDECIDED:
            raise NotACall
        self.use()

    def use(self) -> None:
        """Uses up everything read, whatever its length."""
        self._mark = self.pos

    def rewind(self) -> None:
        """Goes back to what was used up last."""
        self.pos = self._mark

    def give_back(self) -> str:
        """Uses up everything read and returns it as text, but not more than may be held back."""
        # Where reading went further depends on how the text was cut.
        self.pos = min(self.pos, self._mark + MAX_UNDECIDED)
        text = self.text[self._mark : self.pos]
        self._mark = self.pos
        return text

    def more(self) -> Reading[bool]:
        """Waits for a character; False at the end of the text.

        Raises:
          NotACall: too much is held back already.
        """
        while self.pos >= len(self.text):
            if self.pos - self._mark > MAX_UNDECIDED:
                raise NotACall
            if self.is_complete:
                return False
            yield None
        return True

    def peek(self) -> Reading[str]:
        """Returns the next character without taking it; "" at the end."""
        return self.text[self.pos] if (yield from self.more()) else ""

    def take(self, expected: str) -> Reading[bool]:
        """Takes a fixed string if it is what follows."""
        for count, char in enumerate(expected):
            while self.pos + count >= len(self.text):
                if self.is_complete:
                    return False
                yield None
            if self.text[self.pos + count] != char:
                return False
        self.pos += len(expected)
        return True

    def expect(self, expected: str) -> Reading[None]:
        """Takes a fixed string.

        Raises:
          NotACall: something else follows.
        """
        if not (yield from self.take(expected)):
            raise NotACall

    def span(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes characters as long as the pattern, which matches any number of them, goes on."""
        pieces = []
        while (yield from self.more()):
            piece = pattern.match(self.text, self.pos)
            if piece is None or not piece.group():
                break
            pieces.append(piece.group())
            self.pos = piece.end()
        return "".join(pieces)

    def skip_space(self) -> Reading[None]:
        """Takes white space."""
        yield from self.span(_SPACE)


class Calls:
    """The functions that may be called, and the calls made so far.

    Attributes:
      tools: the parameters' JSON Schema by the function's name.
    """

    def __init__(self, tools: dict[str, dict[str, object]]) -> None:
        self.tools = tools
        self._index = -1

    def check(self, name: str) -> str:
        """Returns a name that may be called.

        Raises:
          NotACall: there is no such function.
        """
        if name not in self.tools:
            raise NotACall
        return name

    def open(self, name: str, arguments: str = "") -> CallDelta:
        """Returns the first piece of the next call."""
        self._index += 1
        return CallDelta(self._index, name, arguments)

    def add(self, arguments: str) -> CallDelta:
        """Returns a further piece of the call opened last."""
        return CallDelta(self._index, None, arguments)


Reader = Callable[[Source, Calls], Reading[None]]
"""Reads calls from where their marker ended, or, without one, from where the answer begins."""


def read_list(source: Source, read: Callable[[], Reading[None]]) -> Reading[None]:
    """Reads calls up to the bracket that closes their list; after the first it may be missing.

    Args:
      source: stands behind the bracket that opens it.
      read: reads one of them.
    """
    while True:
        yield from source.skip_space()
        yield from read()
        yield from source.skip_space()
        if (yield from source.take("]")):
            source.commit()
            return
        if not (yield from source.take(",")):
            source.rewind()
            return
