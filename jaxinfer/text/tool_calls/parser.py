"""The one reader of answers: text, reasoning and calls, from text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.text.tool_calls.events import CallDelta, Event, Reasoning, Text, merged
from jaxinfer.text.tool_calls.formats import CallFormat
from jaxinfer.text.tool_calls.markers import Markers, Remover
from jaxinfer.text.tool_calls.source import Calls, NotACall, Reading, Source

_SPACE = " \t\r\n"
_NOTHING = Markers(())


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around the reasoning at the beginning of an answer."""

    open: str
    close: str


@dataclass(frozen=True)
class AnswerSyntax:
    """How one answer is read.

    Attributes:
      reasoning: the tags around reasoning; None means there is none.
      starts_in_reasoning: whether the prompt has opened the reasoning already.
      calls: how calls are written; None means that nothing is a call.
      tools: the functions that may be called, with their parameters' JSON Schema.
      only_one_call: whether further calls are dropped.
      dropped: strings that are no part of the answer: the texts of special tokens.
    """

    reasoning: ReasoningTags | None = None
    starts_in_reasoning: bool = False
    calls: CallFormat | None = None
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    only_one_call: bool = False
    dropped: Markers = _NOTHING


class AnswerParser:
    """Reads one answer.

    What comes out depends on the text alone, not on how it was cut. Text outside of reasoning and
    calls is passed on unchanged, except for white space around reasoning and between calls. What
    only looked like a call is text. A call that has begun and is broken, or that the text ends
    within, is a call with the arguments there are.

    Attributes:
      is_reasoning: whether the text so far ends within reasoning.
    """

    def __init__(self, syntax: AnswerSyntax) -> None:
        self._syntax = syntax
        self._source = Source()
        self._calls = Calls(dict(syntax.tools))
        self._remover = Remover(syntax.dropped)
        self._machine: Iterator[Event | None] = self._read()
        self._gap = ""  # white space that is text only if other text follows
        self._is_in_text = False
        self._has_reasoned = self.is_reasoning = syntax.starts_in_reasoning
        self._has_called = False

    def push(self, text: str) -> list[Event]:
        """Returns what is certain after this piece."""
        self._source.push(self._remover.push(text))
        return self._drain()

    def finish(self) -> list[Event]:
        """Returns what was held back: the text has ended."""
        self._source.push(self._remover.push("", is_all=True))
        self._source.is_complete = True
        events = self._drain()
        if self._gap and not self._has_called and not self._has_reasoned:
            events.append(Text(self._gap))
        return merged(events)

    def _drain(self) -> list[Event]:
        events = []
        for event in self._machine:
            if event is None:
                break
            settled = self._settled(event)
            if settled is not None:
                events.append(settled)
        return merged(events)

    def _settled(self, event: Event) -> Event | None:
        """Returns an event without what turned out to be no part of the answer."""
        if isinstance(event, Reasoning):
            return event
        if isinstance(event, CallDelta):
            self._gap, self._is_in_text, self._has_called = "", False, True
            is_dropped = self._syntax.only_one_call and event.index
            return None if is_dropped else event
        if self._is_in_text:
            return event
        body = event.text.lstrip(_SPACE)
        if not self._has_reasoned or self._has_called:
            self._gap += event.text[: len(event.text) - len(body)]
        if not body:
            return None
        text, self._gap, self._is_in_text = self._gap + body, "", True
        return Text(text)

    def _read(self) -> Reading[None]:
        source = self._source
        yield from self._guarded(self._reasoning())
        form = self._syntax.calls
        if form is not None and form.bare:
            yield from self._guarded(self._bare_call(form))
        markers = Markers(form.starts if form is not None else ())
        while True:
            end, marker = markers.search(source.text, source.pos, source.is_complete)
            piece = source.text[source.pos : end]
            source.pos = end
            source.use()
            if piece:
                yield Text(piece)
            if marker and form is not None:
                source.pos += len(marker)
                yield from self._guarded(form.read(source, self._calls))
            elif source.is_complete:
                return
            else:
                yield None

    def _guarded(self, reading: Reading[None]) -> Reading[None]:
        """Reads something that may turn out to be text."""
        try:
            yield from reading
        except NotACall:
            text = self._source.give_back()
            if text:
                yield Text(text)

    def _bare_call(self, form: CallFormat) -> Reading[None]:
        source = self._source
        yield from source.skip_space()
        first = yield from source.peek()
        if first and first in form.bare:
            yield from form.read(source, self._calls)
        else:
            source.rewind()

    def _reasoning(self) -> Reading[None]:
        source, tags = self._source, self._syntax.reasoning
        if tags is None:
            return
        yield from source.skip_space()
        # Where the prompt has opened it, models may open it again.
        if not (yield from source.take(tags.open)) and not self._syntax.starts_in_reasoning:
            source.rewind()
            return
        source.commit()
        self._has_reasoned = self.is_reasoning = True
        closing = Markers((tags.close,))
        gap = None  # white space within, once there is something before it
        while True:
            end, marker = closing.search(source.text, source.pos, source.is_complete)
            piece = source.text[source.pos : end]
            source.pos = end + len(marker)
            source.use()
            if gap is None:
                piece = piece.lstrip(_SPACE)
            body = piece.rstrip(_SPACE)
            if body:
                yield Reasoning((gap or "") + body)
                gap = piece[len(body) :]
            elif gap is not None:
                gap += piece
            if marker or source.is_complete:
                self.is_reasoning = False
                return
            yield None
