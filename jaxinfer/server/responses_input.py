"""The items of a response's input as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.server.errors import invalid, missing, shown, unsupported
from jaxinfer.server.fields import array, json_object, one_of, string

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_MEDIA_PARTS = ("input_image", "input_file", "input_audio")


def read_input(value: Any, instructions: str | None) -> tuple[list[Message], list[str]]:
    """Returns the messages that an input stands for, and which part of it each comes from.

    Calls go into the message they were made with, and so does the reasoning before.

    Raises:
      ApiError: 400; it is neither text nor items, or an item is not understood.
    """
    messages, sources = [], []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        sources.append("instructions")
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
        sources.append("input")
        return messages, sources
    if not isinstance(value, list):
        message = f"input must be a string or an array of items, got {shown(value)}"
        raise invalid("input", message, "invalid_type")
    reader = _Reader(messages, sources)
    array(reader.read, low=1)(value, "input")
    return messages, sources


def read_kind(value: Mapping[str, Any], path: str) -> str:
    """Returns the `type` of an object.

    Raises:
      ApiError: 400; it has none.
    """
    kind = value.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    return str(string()(kind, f"{path}.type"))


class _Reader:
    """Appends what items stand for; they are read in order."""

    def __init__(self, messages: list[Message], sources: list[str]) -> None:
        self._messages = messages
        self._sources = sources
        self._reasoning = ""
        self._can_call = False  # whether a call that comes now belongs to the last message

    def read(self, value: Any, path: str) -> None:
        """Reads one item."""
        item = json_object(value, path)
        # What has a role needs no type.
        kind = "message" if "type" not in item and "role" in item else read_kind(item, path)
        if kind == "message":
            self._read_message(item, path)
        elif kind == "function_call":
            self._read_call(item, path)
        elif kind == "function_call_output":
            call_id = _required(item, "call_id", path)
            output = _read_text(item.get("output"), f"{path}.output")
            self._append({"role": "tool", "tool_call_id": call_id, "content": output}, path)
        elif kind == "reasoning":
            self._read_reasoning(item, path)
        elif kind == "item_reference":
            message = f"{path} refers to an item, but this server keeps none; send the item itself"
            raise unsupported(path, message)
        else:
            raise invalid(f"{path}.type", f"{path}.type {shown(kind)} is not supported")

    def _append(self, message: Message, path: str) -> None:
        self._messages.append(message)
        self._sources.append(path)
        self._can_call = message["role"] == "assistant"
        if self._can_call and self._reasoning:
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""

    def _read_message(self, item: Mapping[str, Any], path: str) -> None:
        role = one_of(*_ROLES)(item.get("role"), f"{path}.role")
        content = _read_text(item.get("content"), f"{path}.content")
        self._append({"role": role, "content": content}, path)

    def _read_call(self, item: Mapping[str, Any], path: str) -> None:
        call_id = _required(item, "call_id", path)
        function = {name: _required(item, name, path) for name in ("name", "arguments")}
        if not self._can_call or self._reasoning:
            self._append({"role": "assistant", "content": "", "tool_calls": []}, path)
        calls = self._messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _read_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        """Keeps what was thought; a summary or an encrypted text is of no use here."""

        def read(part: Any, where: str) -> str:
            return _required(json_object(part, where), "text", where)

        content = item.get("content")
        if content is not None:
            self._reasoning += "".join(array(read)(content, f"{path}.content"))


def _required(item: Mapping[str, Any], name: str, path: str) -> str:
    path = f"{path}.{name}"
    if item.get(name) is None:
        raise missing(path)
    return str(string()(item[name], path))


def _read_text(value: Any, path: str) -> str | list[dict[str, str]]:
    """Returns a text, or text parts as a chat has them."""
    if value is None:
        raise missing(path)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        message = f"{path} must be a string or an array of parts, got {shown(value)}"
        raise invalid(path, message, "invalid_type")

    def read(part: Any, where: str) -> dict[str, str]:
        kind = read_kind(json_object(part, where), where)
        if kind in _TEXT_PARTS:
            return {"type": "text", "text": _required(part, "text", where)}
        if kind == "refusal":
            return {"type": "text", "text": _required(part, "refusal", where)}
        if kind in _MEDIA_PARTS:
            raise unsupported(where, f"{where} is {kind}, and this model reads text only")
        raise invalid(f"{where}.type", f"{where}.type must be a text, got {shown(kind)}")

    # The parts of an empty list are an empty text.
    return array(read)(value, path) or ""
