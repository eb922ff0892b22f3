"""What the cells of the client matrix share: their register, and a schema to fill in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

CELLS: dict[tuple[str, str], Callable[[Any], Any]] = {}

MESSAGES = [{"role": "user", "content": "Name one colour."}]
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["s", "l"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "note", "description": "Notes a city.", "parameters": CITY_SCHEMA},
}
FLAT_TOOL = {"type": "function", "name": "note", "parameters": CITY_SCHEMA, "strict": True}
NAMED = {"type": "function", "function": {"name": "note"}}


def cell(client: str, name: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Registers a cell."""

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CELLS[client, name] = function
        return function

    return register


def check_city(arguments: str | dict[str, Any]) -> None:
    """Checks that arguments fit the schema."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "size"}, value
    assert value["size"] in ("s", "l"), value


def city_model() -> Any:
    """Returns a pydantic model of the schema."""
    from typing import Annotated, Literal

    import pydantic

    return pydantic.create_model(
        "City",
        city=(Annotated[str, pydantic.Field(max_length=12)], ...),
        size=(Literal["s", "l"], ...),
    )
