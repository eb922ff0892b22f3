"""The parameters that say what an answer's text must match, under all the names they go by."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.grammar import Grammar
from jaxinfer.server.errors import invalid, missing, shown, unsupported
from jaxinfer.server.fields import (
    Field,
    Reader,
    array,
    boolean,
    described,
    json_object,
    one_of,
    string,
)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FORMATS = ("text", "json_object", "json_schema")
"""What an answer may be asked to be."""
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_GRAMMAR_TYPES = ("regex", "json_schema", "lark", "llguidance")


def _text(kind: Any) -> Reader:
    """A grammar that is written as a string."""

    @described({"type": "string"})
    def read(value: Any, path: str) -> Grammar:
        return Grammar(kind, string()(value, path), path)

    return read


@described(_SCHEMA)
def _read_schema(value: Any, path: str) -> Grammar:
    """Accepts a JSON Schema, or the text of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise invalid(path, f"{path} is not a JSON text: {error}") from None
    return Grammar("json_schema", json_object(value, path), path)


@described({"type": "array", "items": {"type": "string"}, "minItems": 1})
def _read_choice(value: Any, path: str) -> Grammar:
    return Grammar("choice", tuple(array(string(), low=1)(value, path)), path)


@described({"type": "boolean"})
def _read_json_object(value: Any, path: str) -> Grammar | None:
    return Grammar("json_object", param=path) if boolean(value, path) else None


_read_grammar = _text("lark")


@described(
    {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "required": ["type", "value"],
                "properties": {"type": {"enum": list(_GRAMMAR_TYPES)}},
            },
        ]
    }
)
def _read_typed_grammar(value: Any, path: str) -> Grammar:
    """Accepts llama.cpp's text of a grammar, or mistral.rs's object that says what it is."""
    if isinstance(value, str):
        return _read_grammar(value, path)
    kind = one_of(*_GRAMMAR_TYPES)(json_object(value, path).get("type"), f"{path}.type")
    inner, where = value.get("value"), f"{path}.value"
    if inner is None:
        raise missing(where)
    if kind == "json_schema":
        return _read_schema(inner, where)
    if kind == "llguidance" and isinstance(inner, dict):
        inner = json.dumps(inner)
    return _text("regex" if kind == "regex" else "lark")(inner, where)


_KINDS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    "json": _read_schema,
    "regex": _text("regex"),
    "choice": _read_choice,
    "grammar": _read_grammar,
    "json_object": _read_json_object,
}
# Of vLLM's other keys these change nothing here: no other engine is fallen back to.
_IGNORED = ("disable_fallback", "_backend", "_backend_was_auto")


@described({"type": "object"})
def _read_structured_outputs(value: Any, path: str) -> Grammar | None:
    grammars = []
    for name, part in json_object(value, path).items():
        if part is None or part is False or name in _IGNORED:
            continue
        if name not in _KINDS:
            raise unsupported(f"{path}.{name}", f"{path}.{shown(name)} is not supported")
        grammars.append(_KINDS[name](part, f"{path}.{name}"))
    found = [grammar for grammar in grammars if grammar is not None]
    if len(found) != 1:
        message = f"{path} must have exactly one of {', '.join(_KINDS)}, got {len(found)}"
        raise invalid(path, message)
    return found[0]


@described(
    {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(FORMATS)}}}
)
def _read_response_format(value: Any, path: str) -> Grammar | None:
    given = json_object(value, path)
    if given.get("type") is None:
        raise missing(f"{path}.type")
    kind = one_of(*FORMATS)(given["type"], f"{path}.type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # llama.cpp's
        if schema is None:
            return Grammar("json_object", param=path)
        return Grammar("json_schema", json_object(schema, f"{path}.schema"), f"{path}.schema")
    return _read_json_schema(given.get("json_schema"), f"{path}.json_schema")


def _read_json_schema(value: Any, path: str) -> Grammar:
    if value is None:
        raise missing(path)
    given = json_object(value, path)
    name, schema = given.get("name"), given.get("schema")
    if name is not None and not _NAME.fullmatch(string()(name, f"{path}.name")):
        where = f"{path}.name"
        raise invalid(where, f"{where} must be 1 to 64 of A-Z a-z 0-9 _ and -, got {shown(name)}")
    # The schema is enforced whatever `strict` says.
    for key, read in (("strict", boolean), ("description", string())):
        if given.get(key) is not None:
            read(given[key], f"{path}.{key}")
    if schema is None:
        return Grammar("json_object", param=path)
    return Grammar("json_schema", json_object(schema, f"{path}.schema"), f"{path}.schema")


RESPONSE_FORMAT = Field(_read_response_format)

CONSTRAINTS: Mapping[str, Field] = {
    "guided_json": Field(_read_schema),
    "guided_regex": Field(_text("regex")),
    "guided_choice": Field(_read_choice),
    "guided_grammar": Field(_read_grammar),
    "structured_outputs": Field(_read_structured_outputs),
    "regex": Field(_text("regex")),
    "grammar": Field(_read_typed_grammar),
    "ebnf": Field(_read_grammar),
    "json_schema": Field(_read_schema),
}
"""The parameters other than `response_format`."""


def read_constraint(values: Mapping[str, Any]) -> tuple[str, Grammar] | None:
    """Returns the one constraint among a request's parameters, and which of them it is.

    Args:
      values: read by a table with `CONSTRAINTS`, and perhaps `RESPONSE_FORMAT`.

    Raises:
      ApiError: 400; there are two.
    """
    found = [
        (name, values[name])
        for name in ("response_format", *CONSTRAINTS)
        if values.get(name) is not None
    ]
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(second, f"{second} excludes {first}; send only one of them")
    return found[0] if found else None
