"""Calls written with a tag per argument, as Qwen3-Coder writes them.

    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

A call is certain at its first parameter. A value is text; the function's schema says whether it
means text or JSON. Text is passed on as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxinfer.text.tool_calls.markers import Markers
from jaxinfer.text.tool_calls.source import Calls, NotACall, Reading, Source

_KEY = re.compile(r"[^<>\n]*")
_VALUE_ENDS = Markers(("\n</parameter>", "</parameter>"))
_TYPES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def xml_call(source: Source, calls: Calls) -> Reading[None]:
    """Reads one call."""
    yield from source.expect("<function=")
    name = calls.check((yield from source.span(_KEY)))
    yield from source.expect(">")
    properties = calls.tools[name].get("properties")
    is_open = False
    while True:
        yield from source.skip_space()
        if (yield from source.take("</function>")):
            source.commit()
            yield calls.add("}") if is_open else calls.open(name, "{}")
            return
        yield from source.expect("<parameter=")
        key = yield from source.span(_KEY)
        yield from source.expect(">")
        yield from source.take("\n")
        source.commit()
        start = f"{json.dumps(key, ensure_ascii=False)}: "
        yield calls.add(", " + start) if is_open else calls.open(name, "{" + start)
        is_open = True
        schema = properties.get(key) if isinstance(properties, dict) else None
        yield from _value(source, calls, schema)


def _value(source: Source, calls: Calls, schema: Any) -> Reading[None]:
    types = _types(schema)
    is_text = types == {"string"}
    pieces = []
    if is_text:
        yield calls.add('"')
    while True:
        end, marker = _VALUE_ENDS.search(source.text, source.pos, source.is_complete)
        piece = source.text[source.pos : end]
        source.pos = end + len(marker)
        source.use()
        if not is_text:
            pieces.append(piece)
        elif piece:
            yield calls.add(json.dumps(piece, ensure_ascii=False)[1:-1])
        if marker:
            yield calls.add('"' if is_text else _as_json("".join(pieces), types))
            return
        if source.is_complete:
            # What there is of it is part of the call.
            if pieces:
                yield calls.add("".join(pieces))
            raise NotACall
        yield None


def _types(schema: Any) -> set[str]:
    """Returns the types a schema allows, as far as it says so itself."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type", [])
    types = {item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str)}
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            types |= _types(alternative)
    return types


def _as_json(text: str, types: set[str]) -> str:
    """Returns a value's JSON: of the type that fits, else as text."""
    try:
        value = _PYTHON_WORDS[text] if text in _PYTHON_WORDS else json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if types and not types.intersection(_TYPES[type(value)]):
        value = text
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
