"""A Grammar as the text that llguidance reads."""

from __future__ import annotations

import json
from typing import Any

from jaxinfer.grammar import Grammar

MAX_BYTES = 1 << 18
"""Of a grammar's text; schemas of hundreds of tools have half of it."""

_WHITESPACE = r"(?: |\r?\n[ \t]{0,20})"
"""Between the parts of JSON: a space, or a line's end and an indentation. Small models would fill
the context with it."""


def llguidance_text(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's form; one of kind lark may still be GBNF.

    Raises:
      ValueError: it is too large, nests too deeply, or holds what JSON or Unicode text cannot.
    """
    try:
        text = _text(grammar)
        size = len(text.encode())
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise ValueError(f"it takes at most {MAX_BYTES} bytes, got {size}")
    return text


def _text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return _json(grammar.value)
        case "json_object":
            return _json({"type": "object"})
        case "regex":
            import llguidance

            # Digits are those of ASCII, as in most engines of patterns that people know.
            return f"start: /{llguidance.regex_to_lark(grammar.value, 'd')}/"
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in grammar.value)
            # One lexeme: of as many rules as there are texts, each token would cost all.
            return "start: CHOICE\nCHOICE: " + " | ".join(texts)
        case _:
            return str(grammar.value)


def _json(schema: dict[str, Any] | bool) -> str:
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict):  # else llguidance says that it must be
            options = {"whitespace_pattern": _WHITESPACE, **options}
        schema = {**schema, "x-guidance": options}
    try:
        return json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"it holds what JSON cannot: {error}") from None
