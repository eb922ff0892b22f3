"""A table of parameters: how each is read from JSON, and what happens to those not honoured.

Readers take (value, path) and return a checked value; null never reaches them (it means absent).
Those made here know the JSON Schema of what they accept; `described` gives one to any other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.server.errors import invalid, shown, unsupported

_log = logging.getLogger(__name__)

Reader = Callable[[Any, str], Any]


@dataclass(frozen=True)
class _Described:
    """A reader with the schema of its values."""

    read: Reader
    schema: Mapping[str, Any]

    def __call__(self, value: Any, path: str) -> Any:
        return self.read(value, path)


def described(schema: Mapping[str, Any]) -> Callable[[Reader], Reader]:
    """Returns a decorator that tells a reader's JSON Schema: what does not fit it, it refuses."""

    def describe(read: Reader) -> Reader:
        return _Described(read, schema)

    return describe


def schema_of(reader: Reader) -> dict[str, Any]:
    """Returns the JSON Schema of what a reader accepts; {}, anything, if it has told none."""
    return dict(reader.schema) if isinstance(reader, _Described) else {}


@dataclass(frozen=True)
class Field:
    """One known parameter.

    Attributes:
      read: checks and converts its value.
      is_honoured: whether the value is used; otherwise it is checked and dropped.
      name: the parameter it is another name of.
    """

    read: Reader
    is_honoured: bool = True
    name: str | None = None


def ignored(read: Reader) -> Field:
    """Returns a parameter that does not change the answer: type-checked, then dropped."""
    return Field(read, is_honoured=False)


def refused(*off_values: Any, because: str = "is not supported by this server") -> Field:
    """Returns a parameter that would change the answer: only its off values are accepted."""

    @described({"enum": list(off_values)} if off_values else {"not": {}})
    def read(value: Any, path: str) -> None:
        if not any(_same(value, off) for off in off_values):
            raise unsupported(path, f"{path} {because} (got {shown(value)})")

    return Field(read, is_honoured=False)


def _same(value: Any, off: Any) -> bool:
    return isinstance(value, bool) == isinstance(off, bool) and value == off


def read_object(
    body: Mapping[str, Any], table: Mapping[str, Field], *, strict: bool
) -> dict[str, Any]:
    """Returns the honoured parameters of `body` that are not null.

    Raises:
      ApiError: 400; a value does not fit, or `strict` and a name is unknown.
    """
    values: dict[str, Any] = {}
    unknown = []
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            unknown.append(shown(name))
        elif value is not None:
            checked = field.read(value, name)
            if field.is_honoured:
                values.setdefault(field.name or name, checked)
    if unknown and strict:
        raise invalid(None, f"Unrecognized request argument supplied: {unknown[0]}", None)
    if unknown:
        _log.warning("ignored unknown request parameters: %s", ", ".join(unknown[:10]))
    return values


def anything(value: Any, path: str) -> Any:
    """Accepts any JSON value."""
    return value


@described({"type": "boolean"})
def boolean(value: Any, path: str) -> bool:
    """Accepts true and false."""
    if not isinstance(value, bool):
        raise _wrong_type(path, "a boolean", value)
    return value


def integer(low: int | None = None, high: int | None = None) -> Reader:
    """Returns a reader of integers in low..high; 8.0 is 8, true and '8' are refused."""

    @described(_bounded({"type": "integer"}, minimum=low, maximum=high))
    def read(value: Any, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wrong_type(path, "an integer", value)
        _check_range(value, path, low, high, "integer")
        return value

    return read


def number(low: float | None = None, high: float | None = None) -> Reader:
    """Returns a reader of finite numbers in low..high."""

    @described(_bounded({"type": "number"}, minimum=low, maximum=high))
    def read(value: Any, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong_type(path, "a number", value)
        _check_range(value, path, low, high, "decimal")
        try:
            converted = float(value)
        except OverflowError:
            converted = math.inf
        if not math.isfinite(converted):
            raise _wrong_type(path, "a finite number", value)
        return converted

    return read


def _check_range(
    value: int | float, path: str, low: int | float | None, high: int | float | None, kind: str
) -> None:
    if low is not None and value < low:
        message = f"{path} must be at least {_bound(low)}, got {shown(value)}"
        raise invalid(path, message, f"{kind}_below_min_value")
    if high is not None and value > high:
        message = f"{path} must be at most {_bound(high)}, got {shown(value)}"
        raise invalid(path, message, f"{kind}_above_max_value")


def _bound(limit: int | float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def string(max_length: int | None = None) -> Reader:
    """Returns a reader of strings."""

    @described(_bounded({"type": "string"}, maxLength=max_length))
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise _wrong_type(path, "a string", value)
        if max_length is not None and len(value) > max_length:
            message = f"{path} takes at most {max_length} characters, got {len(value)}"
            raise invalid(path, message, "string_above_max_length")
        return value

    return read


def one_of(*choices: str) -> Reader:
    """Returns a reader of an enumeration."""

    @described({"type": "string", "enum": list(choices)})
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise _wrong_type(path, "a string", value)
        if value not in choices:
            raise invalid(path, f"{path} must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    return read


def array(item: Reader, low: int = 0, high: int | None = None) -> Reader:
    """Returns a reader of arrays with low..high items."""

    @described(
        _bounded({"type": "array", "items": schema_of(item)}, minItems=low or None, maxItems=high)
    )
    def read(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong_type(path, "an array", value)
        if len(value) < low:
            raise invalid(path, f"{path} must have at least {low} item(s)", "empty_array")
        if high is not None and len(value) > high:
            message = f"{path} takes at most {high} items, got {len(value)}"
            raise invalid(path, message, "array_above_max_length")
        return [item(element, f"{path}[{index}]") for index, element in enumerate(value)]

    return read


@described({"type": "object"})
def json_object(value: Any, path: str) -> dict[str, Any]:
    """Accepts any JSON object."""
    if not isinstance(value, dict):
        raise _wrong_type(path, "an object", value)
    return value


def _bounded(schema: dict[str, Any], **bounds: int | float | None) -> dict[str, Any]:
    return {**schema, **{name: bound for name, bound in bounds.items() if bound is not None}}


def _wrong_type(path: str, expected: str, value: Any) -> Exception:
    return invalid(path, f"{path} must be {expected}, got {shown(value)}", "invalid_type")
