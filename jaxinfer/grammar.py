"""What the text of a completion is made to match.

A leaf: imports nothing of ours and no jax. Whether it is a good one shows when it is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice"]


@dataclass(frozen=True)
class Grammar:
    """A constraint on a completion's whole text.

    Attributes:
      kind: how `value` is to be read.
      value: json_schema: the schema, as a dict or a bool; json_object: None; regex: a pattern, in
        the syntax of Rust's regex package; lark: a grammar in llguidance's dialect of Lark, or in
        llama.cpp's GBNF; choice: the texts one of which is written.
      param: the parameter that asked for it, for messages.

    Raises:
      ValueError: there is no such kind, or `value` is not of it.
    """

    kind: GrammarKind
    value: Any = None
    param: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        value: Any = self.value
        if self.kind == "choice" and isinstance(value, list):
            value = tuple(value)
            object.__setattr__(self, "value", value)
        expected = _EXPECTED.get(self.kind)
        if expected is None:
            kinds = ", ".join(get_args(GrammarKind))
            raise ValueError(f"the kind of a grammar must be one of {kinds}, got {self.kind!r}")
        types, what = expected
        if type(value) not in types:
            raise ValueError(
                f"a grammar of kind {self.kind} takes {what}, got a {type(value).__name__}"
            )
        if self.kind == "choice" and not (value and all(isinstance(text, str) for text in value)):
            raise ValueError("a grammar of kind choice takes at least one text, and only texts")


_EXPECTED: dict[str, tuple[tuple[type, ...], str]] = {
    "json_schema": ((dict, bool), "a schema, as a dict or a bool"),
    "json_object": ((type(None),), "no value"),
    "regex": ((str,), "a pattern"),
    "lark": ((str,), "the grammar's text"),
    "choice": ((tuple,), "a tuple of texts"),
}
