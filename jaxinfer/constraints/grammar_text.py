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


def lark_rule(grammar: Grammar, whitespace: str) -> str:
    """Returns the right side of a Lark rule for a grammar that is not itself in Lark.

    Args:
      grammar: of a kind other than lark.
      whitespace: pattern of what stands between the parts of JSON, if its schema does not say so.

    Raises:
      ValueError: it holds what JSON cannot, or its pattern is none.
    """
    if grammar.kind == "regex":
        import llguidance

        # Digits are those of ASCII, as in most engines of patterns that people know.
        return f"/{llguidance.regex_to_lark(grammar.value, 'd')}/"
    if grammar.kind == "choice":
        return " | ".join(_dumps(text) for text in grammar.value)
    return f"%json {_dumps(_schema(grammar, whitespace))}"


def _text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema" | "json_object":
            return _dumps({"grammars": [{"json_schema": _schema(grammar, _WHITESPACE)}]})
        case "regex":
            return f"start: {lark_rule(grammar, _WHITESPACE)}"
        case "choice":
            # One lexeme: of as many rules as there are texts, each token would cost all.
            return f"start: CHOICE\nCHOICE: {lark_rule(grammar, _WHITESPACE)}"
        case _:
            return str(grammar.value)


def _schema(grammar: Grammar, whitespace: str) -> dict[str, Any] | bool:
    schema: Any = {"type": "object"} if grammar.kind == "json_object" else grammar.value
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict):  # else llguidance says that it must be
            options = {"whitespace_pattern": whitespace, **options}
        return {**schema, "x-guidance": options}
    return bool(schema)


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"it holds what JSON cannot: {error}") from None
