"""What an answer is made of: text, reasoning and calls of functions, as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what was thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call.

    Attributes:
      index: which call of the answer, from 0.
      name: the function, on the call's first piece only.
      arguments: a piece of the arguments' JSON; it may be empty.
    """

    index: int
    name: str | None
    arguments: str


Event = Text | Reasoning | CallDelta


@dataclass
class Call:
    """A call of a function; the arguments are JSON as far as the model wrote JSON."""

    name: str
    arguments: str


@dataclass
class Message:
    """The events of an answer, put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def fold(events: Iterable[Event]) -> Message:
    """Returns the whole that the events are pieces of."""
    texts, reasonings, arguments = [], [], []
    message = Message()
    for event in events:
        if isinstance(event, Text):
            texts.append(event.text)
        elif isinstance(event, Reasoning):
            reasonings.append(event.text)
        elif event.name is not None:
            message.calls.append(Call(event.name, ""))
            arguments.append([event.arguments])
        else:
            arguments[event.index].append(event.arguments)
    message.text, message.reasoning = "".join(texts), "".join(reasonings)
    for call, pieces in zip(message.calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return message


def merged(events: Iterable[Event]) -> list[Event]:
    """Returns the same events with neighbours of one kind, and of one call, joined."""
    runs: list[list[Event]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _continues(before: Event, event: Event) -> bool:
    if isinstance(event, CallDelta):
        return isinstance(before, CallDelta) and event.name is None
    return type(before) is type(event)


def _joined(run: list[Event]) -> Event:
    first = run[0]
    if isinstance(first, CallDelta):
        arguments = "".join(event.arguments for event in run if isinstance(event, CallDelta))
        return CallDelta(first.index, first.name, arguments)
    text = "".join(event.text for event in run if not isinstance(event, CallDelta))
    return type(first)(text)
