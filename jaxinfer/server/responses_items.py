"""The items of a response's output: what a chat's deltas add to them, told as events.

An event is a payload without its `sequence_number`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]
Status = Literal["in_progress", "completed", "incomplete"]

_ID_PREFIXES: Mapping[Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS: Mapping[Kind, str] = {"message": "output_text", "reasoning": "reasoning_text"}


class _Item:
    """One item under construction."""

    def __init__(self, kind: Kind, index: int, **fields: str) -> None:
        self.kind = kind
        self.status: Status = "in_progress"
        self.logprobs: list[dict[str, Any]] = []
        self._id = f"{_ID_PREFIXES[kind]}_{secrets.token_hex(12)}"
        self._index = index
        self._fields = fields
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def place(self) -> dict[str, Any]:
        """Where an event of its text belongs."""
        place = {"item_id": self._id, "output_index": self._index}
        return place if self.kind == "function_call" else {**place, "content_index": 0}

    def append(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Event:
        self._pieces.append(text)
        self.logprobs += logprobs
        event: Event = {"type": f"response.{self._stem}.delta", **self.place, "delta": text}
        return {**event, "logprobs": list(logprobs)} if self.kind == "message" else event

    def opening(self) -> Iterator[Event]:
        yield {**self._event("output_item.added"), "item": self.as_json()}
        if self.kind != "function_call":
            yield {"type": "response.content_part.added", **self.place, "part": self._part()}

    def closing(self, status: Status) -> Iterator[Event]:
        done = {"type": f"response.{self._stem}.done", **self.place}
        if self.kind == "function_call":
            yield {**done, **self._fields, "arguments": self.text}
        else:
            logprobs = {"logprobs": list(self.logprobs)} if self.kind == "message" else {}
            yield {**done, "text": self.text, **logprobs}
            yield {"type": "response.content_part.done", **self.place, "part": self._part()}
        self.status = status
        yield {**self._event("output_item.done"), "item": self.as_json()}

    def as_json(self) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return {**item, **self._fields, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self._part()]
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content, "encrypted_content": None}
        return {**item, "role": "assistant", "content": content}

    @property
    def _stem(self) -> str:
        return _PARTS.get(self.kind, "function_call_arguments")

    def _event(self, name: str) -> Event:
        return {"type": f"response.{name}", "output_index": self._index}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[self.kind], "text": self.text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": list(self.logprobs)}
        return part


class OutputItems:
    """The output of one response; at most one item is open at a time, the last one."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._held: list[dict[str, Any]] = []

    def add(self, delta: Mapping[str, Any], logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Takes a delta of a chat's message; yields what it changes.

        Log-probabilities are told with the text they lead to. Of tokens of anything else there are
        none.
        """
        self._held += logprobs
        if delta.get("content"):
            yield from self._open("message")
            yield self._say(delta["content"])
        elif delta.get("reasoning_content"):
            self._held.clear()
            yield from self._open("reasoning")
            yield self._items[-1].append(delta["reasoning_content"], ())
        for call in delta.get("tool_calls", ()):
            self._held.clear()
            function = call["function"]
            if "name" in function:
                yield from self._close("completed")
                yield from self._begin("function_call", call_id=call["id"], name=function["name"])
            if function["arguments"]:
                yield self._items[-1].append(function["arguments"], ())

    def end(self, status: Status) -> Iterator[Event]:
        """Closes what is open; an output of nothing at all becomes an empty message."""
        if not self._items:
            yield from self._open("message")
        if self._held and self._items[-1].kind == "message":
            yield self._say("")
        yield from self._close(status)

    def as_json(self) -> list[dict[str, Any]]:
        """Returns the items as far as they are known."""
        return [item.as_json() for item in self._items]

    def _say(self, text: str) -> Event:
        held, self._held = self._held, []
        return self._items[-1].append(text, held)

    def _open(self, kind: Kind) -> Iterator[Event]:
        if self._items and self._items[-1].kind == kind:
            return
        yield from self._close("completed")
        yield from self._begin(kind)

    def _begin(self, kind: Kind, **fields: str) -> Iterator[Event]:
        item = _Item(kind, len(self._items), **fields)
        self._items.append(item)
        yield from item.opening()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._items and self._items[-1].status == "in_progress":
            yield from self._items[-1].closing(status)
