"""Calls written as Python: [get_weather(city="Oslo", days=3), ...].

A call is certain when its last parenthesis is there and all its arguments were literals.
"""

from __future__ import annotations

import json
import re

from jaxinfer.text.tool_calls.source import Calls, NotACall, Reading, Source, read_list

_NAME = re.compile(r"[\w.-]*")
_NUMBER = re.compile(r"[0-9eE.+-]*")
_WORD = re.compile(r"[A-Za-z]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {word: word for word in ("true", "false", "null")}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_MAX_DEPTH = 32
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def python_calls(source: Source, calls: Calls) -> Reading[None]:
    """Reads a list of calls."""
    yield from source.expect("[")
    yield from read_list(source, lambda: _call(source, calls))


def _call(source: Source, calls: Calls) -> Reading[None]:
    name = calls.check((yield from source.span(_NAME)))
    arguments = yield from _arguments(source)
    source.commit()
    yield calls.open(name, arguments)


def _arguments(source: Source) -> Reading[str]:
    """Returns the JSON of `(name=literal, ...)`."""
    yield from source.expect("(")
    pairs: list[str] = []
    while True:
        yield from source.skip_space()
        if (yield from source.take(")")):
            return f"{{{', '.join(pairs)}}}"
        if pairs:
            yield from source.expect(",")
            yield from source.skip_space()
        name = yield from source.span(_NAME)
        if not name:
            raise NotACall
        yield from source.skip_space()
        yield from source.expect("=")
        yield from source.skip_space()
        value = yield from _literal(source, _MAX_DEPTH)
        pairs.append(f"{json.dumps(name, ensure_ascii=False)}: {value}")


def _literal(source: Source, depth: int) -> Reading[str]:
    """Returns the JSON of a Python or JSON literal."""
    char = yield from source.peek()
    if not char or not depth:
        raise NotACall
    if char in "\"'":
        text = yield from _string(source, char)
        return json.dumps(text, ensure_ascii=False)
    if char in "[({":
        return (yield from _collection(source, char, depth - 1))
    if char.isalpha():
        word = _WORDS.get((yield from source.span(_WORD)))
        if word is None:
            raise NotACall
        return word
    number = yield from source.span(_NUMBER)
    try:
        return json.dumps(json.loads(number), allow_nan=False)
    except (ValueError, RecursionError):
        raise NotACall from None


def _collection(source: Source, opening: str, depth: int) -> Reading[str]:
    source.pos += 1
    items: list[str] = []
    is_mapping = opening == "{"
    closing = _CLOSING[opening]
    while True:
        yield from source.skip_space()
        if (yield from source.take(closing)):
            break
        if items:
            yield from source.expect(",")
            yield from source.skip_space()
            if (yield from source.take(closing)):
                break
        item = yield from _literal(source, depth)
        if is_mapping:
            if not item.startswith('"'):
                raise NotACall
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            value = yield from _literal(source, depth)
            item = f"{item}: {value}"
        items.append(item)
    return f"{{{', '.join(items)}}}" if is_mapping else f"[{', '.join(items)}]"


def _string(source: Source, quote: str) -> Reading[str]:
    if (yield from source.take(quote * 3)):
        ending = quote * 3
    else:
        ending = quote
        source.pos += 1
    pieces = []
    while True:
        pieces.append((yield from source.span(_PLAIN[quote])))
        if (yield from source.take(ending)):
            break
        char = yield from source.peek()
        if not char:
            raise NotACall
        source.pos += 1
        if char == "\\":
            char += yield from source.peek()
            source.pos = min(source.pos + 1, len(source.text))
        pieces.append(char)
    try:
        # Escapes may spell the halves of one character.
        text = _ESCAPE.sub(_unescape, "".join(pieces))
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except ValueError:
        raise NotACall from None


def _unescape(match: re.Match[str]) -> str:
    *codes, char = match.groups()
    if char is None:
        return chr(int(next(code for code in codes if code), 16))
    return _ESCAPED.get(char, char if char in "\"'\\" else match.group())
