"""Calls written as JSON: {"name": ..., "arguments": {...}}.

A call is certain as soon as it names a function there is and its arguments begin as an object.
From then on they are passed on as they come, up to the bracket that closes them: what the model
wrote between is not judged, except that control characters in strings are escaped, which models
often forget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxinfer.text.surrogates import refuse_surrogates
from jaxinfer.text.tool_calls.events import CallDelta
from jaxinfer.text.tool_calls.source import Calls, NotACall, Reading, Source, read_list

ARGUMENT_KEYS = ("arguments", "parameters")

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[\w.+-]*")
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


def json_call(source: Source, calls: Calls) -> Reading[None]:
    """Reads one call; a brace that is missing behind the arguments is forgiven."""
    yield from source.expect("{")
    name, held = "", ""
    is_first, is_open = True, False
    while True:
        yield from source.skip_space()
        if (yield from source.take("}")):
            break
        if not is_first and not (yield from source.take(",")):
            if is_open:
                source.rewind()
                return
            raise NotACall
        is_first = False
        yield from source.skip_space()
        key = yield from _json_string(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == "name" and not name:
            name = calls.check((yield from _json_string(source)))
        elif key in ARGUMENT_KEYS and not held and not is_open:
            if name and (yield from source.peek()) == "{":
                yield from streamed_arguments(source, calls, name)
                is_open = True
            else:
                held = yield from _held_arguments(source)
        else:
            yield from _skip_value(source)
        if name and held and not is_open:
            source.commit()
            yield calls.open(name, held)
            is_open = True
    if not is_open:
        calls.check(name)
        source.commit()
        yield calls.open(name, "{}")
    source.commit()


def json_array(source: Source, calls: Calls) -> Reading[None]:
    """Reads an array of calls from behind its bracket."""
    yield from read_list(source, lambda: json_call(source, calls))


def streamed_arguments(source: Source, calls: Calls, name: str) -> Reading[None]:
    """Opens a call and passes on its arguments, whose "{" comes next."""
    source.commit()
    yield calls.open(name)
    yield from _brackets(source, calls.add)


def _held_arguments(source: Source) -> Reading[str]:
    """Returns arguments that cannot be passed on yet, or that need converting."""
    first = yield from source.peek()
    if first == "{":
        return (yield from _brackets(source))
    if first == '"':
        text = yield from _json_string(source)
        try:
            refuse_surrogates(text, "arguments")
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            raise NotACall from None
        if is_object:
            return text
    elif (yield from source.take("null")):
        return "{}"
    raise NotACall


def _brackets(source: Source, pass_on: Callable[[str], CallDelta] | None = None) -> Reading[str]:
    """Reads up to the bracket that closes the one that comes next.

    Returns the text or, with `pass_on`, yields it piece by piece and returns nothing.

    Raises:
      NotACall: the text ends before.
    """
    depth, in_string = 0, False
    pieces: list[str] = []
    while depth or not pieces:
        if source.pos >= len(source.text) and pass_on and any(pieces):
            source.use()
            yield pass_on("".join(pieces))
            pieces = [""]
        if not (yield from source.more()):
            raise NotACall
        run = (_IN_STRING if in_string else _BETWEEN).match(source.text, source.pos)
        piece = run.group() if run else ""
        source.pos += len(piece)
        pieces.append(piece.translate(_CONTROLS) if in_string else piece)
        if source.pos >= len(source.text):
            continue
        char = source.text[source.pos]
        if char == "\\":
            pieces.append((yield from _escape(source)).translate(_CONTROLS))
            continue
        source.pos += 1
        pieces.append(char)
        if char == '"':
            in_string = not in_string
        else:
            depth += 1 if char in "{[" else -1
    if pass_on is None:
        return "".join(pieces)
    source.use()
    yield pass_on("".join(pieces))
    return ""


def _escape(source: Source) -> Reading[str]:
    """Takes a backslash and the character behind it.

    Raises:
      NotACall: the text ends between them.
    """
    while source.pos + 1 >= len(source.text):
        if source.is_complete:
            raise NotACall
        yield None
    source.pos += 2
    return source.text[source.pos - 2 : source.pos]


def _json_string(source: Source) -> Reading[str]:
    yield from source.expect('"')
    pieces = ['"']
    while True:
        pieces.append((yield from source.span(_IN_STRING)))
        char = yield from source.peek()
        if char != "\\":
            break
        pieces.append((yield from _escape(source)))
    yield from source.expect('"')
    try:
        return str(json.loads("".join(pieces) + '"', strict=False))
    except ValueError:
        raise NotACall from None


def _skip_value(source: Source) -> Reading[None]:
    first = yield from source.peek()
    if first and first in "{[":
        yield from _brackets(source)
    elif first == '"':
        yield from _json_string(source)
    elif not (yield from source.span(_SCALAR)):
        raise NotACall
