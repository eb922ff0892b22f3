"""Grammars of answers with calls, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.text.tool_calls.formats import CallFormat
from jaxinfer.text.tool_calls.parser import AnswerSyntax

WHITE_SPACE = r"[ \t\n\r]{1,48}"
"""Pattern of all schemas of an answer with calls: two that differ cannot begin in the same way."""

MAX_REQUIRED_CALLS = 8
"""In one answer. Small models that must call go on calling."""

_DEFINITIONS = ("$defs", "definitions")


def answer_grammar(
    syntax: AnswerSyntax,
    special: Mapping[str, int],
    *,
    is_required: bool = False,
    strict: frozenset[str] = frozenset(),
    other: str | None = None,
) -> str:
    """Returns the grammar of an answer that `syntax` reads: reasoning, if any, then its body.

    Args:
      syntax: how the answer is read; what calls it has must fit the tools' schemas.
      special: ids of the markers that are special tokens, which no text can spell.
      is_required: whether the body consists of calls.
      strict: names of the functions whose schema must be understood completely; of others, what is
        not understood is passed over.
      other: the right side of a rule that a body without calls follows; None leaves it free.
    """
    writer = _Writer(syntax, special, strict)
    start = writer.start()
    form = syntax.calls
    if form is None:
        body = "TEXT" if other is None else "other"
    elif is_required:
        body = writer.calls(form)
    elif other is None:
        body = writer.free_text(form)
    else:
        # Two ways to go on from "{" are told apart only where both are JSON.
        body = (writer.json_calls() if "{" in form.bare else writer.calls(form)) + " | other"
    if other is not None:
        writer.rules.append(f"other: {other}")
    return "\n".join([f"start: {start}", f"body: {body}", *writer.rules, ""])


class _Writer:
    def __init__(
        self, syntax: AnswerSyntax, special: Mapping[str, int], strict: frozenset[str]
    ) -> None:
        self._syntax, self._special, self._strict = syntax, special, strict
        self.rules = ["TEXT: /(?s:.*)/"]

    def start(self) -> str:
        """Returns the right side of the first rule: the body, after reasoning if there may be."""
        tags = self._syntax.reasoning
        if tags is None:
            return "body"
        self.rules += [*self._up_to("thought", tags.close), r"gap: /[ \n]{0,4}/"]
        if self._syntax.starts_in_reasoning:
            return "thought gap body"
        return f"({self._literal(tags.open)} thought gap)? body"

    def calls(self, form: CallFormat) -> str:
        """Returns a rule's right side: calls and nothing else."""
        self.rules += self._call_rules(form, form.before)
        repeat = f"{{0,{MAX_REQUIRED_CALLS - 1}}}"
        more = "" if self._syntax.only_one_call else f"({self._literal(form.between)} call){repeat}"
        return _sequence(self._literal(form.opening), "call", more, self._literal(form.closing))

    def json_calls(self) -> str:
        """Returns a rule's right side: one call, which is a JSON object from beginning to end."""
        rules = []
        for name, parameters in self._syntax.tools.items():
            schema = self._schema(name, parameters)
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": schema},
                "required": ["name", "parameters"],
                "additionalProperties": False,
                **{key: schema.pop(key) for key in (*_DEFINITIONS, "x-guidance") if key in schema},
            }
            rules.append(f"%json {_dumps(call)}")
        return " | ".join(rules)

    def free_text(self, form: CallFormat) -> str:
        """Returns a rule's right side: any text, in which each call is a right one."""
        repeat = "?" if self._syntax.only_one_call else "*"
        start = form.starts[0] if form.starts else ""
        if not start or not (form.opening + form.before).startswith(start):
            tags = self._syntax.reasoning
            first = re.escape(form.bare + (tags.open[0] if tags is not None else ""))
            self.rules.append(rf"PLAIN: /[ \t\r\n]*([^{first} \t\r\n](?s:.*))?/")
            return f"PLAIN | {self.calls(form)}"
        self.rules += self._up_to("head", start)
        if form.opening:
            self.rules += self._call_rules(form, form.before)
            more = "" if self._syntax.only_one_call else f"({self._literal(form.between)} call)*"
            opening = self._literal(form.opening.removeprefix(start))
            group = _sequence(opening, "call", more, self._literal(form.closing))
        else:
            self.rules += self._call_rules(form, form.before.removeprefix(start))
            group = "call"
        return f"(head {group}){repeat} TEXT"

    def _up_to(self, rule: str, marker: str) -> list[str]:
        """Returns a rule for the text up to a marker's first occurrence, and the marker."""
        if marker in self._special:
            return [f"{rule}: TEXT {self._literal(marker)}"]
        return [f"{rule}[lazy]: TEXT {self._literal(marker)}"]

    def _call_rules(self, form: CallFormat, before: str) -> list[str]:
        rules, names = [], []
        after = self._literal(form.after)
        for number, (name, parameters) in enumerate(self._syntax.tools.items()):
            opening = self._literal(before.replace("$name", name))
            rules.append(f"call_{number}: {_sequence(opening, f'arguments_{number}', after)}")
            schema = self._schema(name, parameters)
            if form.python_arguments:
                rules += _python_arguments(f"arguments_{number}", schema)
            else:
                rules.append(f"arguments_{number}: %json {_dumps(schema)}")
            names.append(f"call_{number}")
        return [f"call: {' | '.join(names)}", *rules]

    def _schema(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE}
        if name not in self._strict:
            options["lenient"] = True
        own = parameters.get("x-guidance")
        if isinstance(own, dict):
            options |= own
        # A function takes no arguments but its own, which JSON Schema leaves open.
        closed = {"additionalProperties": False} if "properties" in parameters else {}
        return {"type": "object", **closed, **parameters, "x-guidance": options}

    def _literal(self, text: str) -> str:
        """Returns a fixed text as symbols; the special tokens in it are tokens."""
        pieces = [text]
        if self._special:
            pieces = re.split("(" + "|".join(map(re.escape, self._special)) + ")", text)
        return _sequence(
            *(
                f"<[{self._special[piece]}]>" if piece in self._special else _dumps(piece)
                for piece in pieces
                if piece
            )
        )


def _python_arguments(rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yields the rules of `name=value, ...`: the required ones first, others where wanted.

    `rule_N` stands for what follows where arguments were written before, `rule_first_N` where none
    were.
    """
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required = [name for name in schema.get("required") or () if name in properties]
    names = required + [name for name in properties if name not in required]
    shared = {key: schema[key] for key in (*_DEFINITIONS, "x-guidance") if key in schema}
    yield f"{rule}: {rule}_first_0"
    for number, name in enumerate(names):
        value = properties[name]
        value = {**value, **shared} if isinstance(value, Mapping) else value
        written = f"%json {_dumps(value)} {rule}_{number + 1}"
        optional = name not in required
        later, first = f"{rule}_{number + 1}", f"{rule}_first_{number + 1}"
        yield f"{rule}_{number}: {_dumps(f', {name}=')} {written}" + f" | {later}" * optional
        yield f"{rule}_first_{number}: {_dumps(f'{name}=')} {written}" + f" | {first}" * optional
    yield f'{rule}_{len(names)}: ""'
    yield f'{rule}_first_{len(names)}: ""'


def _sequence(*symbols: str) -> str:
    return " ".join(symbol for symbol in symbols if symbol)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
