"""A grammar of each kind, requests that have one, and what must be true of what they write."""

import json
import re

from engine.builders import run_requests

from jaxinfer.grammar import Grammar

COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}
SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": -50, "maximum": 999},
        "size": {"enum": ["s", "m", "xxl"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "size", "tags"],
    "additionalProperties": False,
    "x-guidance": COMPACT,
}
PATTERN = r"[a-f]{3,9}-\d"
CHOICES = ("yes", "no", "no way")


def is_valid(text):
    value = json.loads(text)
    return (
        list(value) == ["age", "size", "tags"]
        and -50 <= value["age"] <= 999
        and value["size"] in ("s", "m", "xxl")
        and len(value["tags"]) <= 3
        and all(isinstance(tag, bool) for tag in value["tags"])
    )


GRAMMARS = {
    "json_schema": (Grammar("json_schema", SCHEMA), is_valid),
    "regex": (Grammar("regex", PATTERN), lambda text: re.fullmatch(PATTERN, text)),
    "choice": (Grammar("choice", CHOICES), lambda text: text in CHOICES),
    "lark": (
        Grammar("lark", 'start: "<" num ("," num){1,3} ">"\nnum: /[0-9]{1,3}/'),
        lambda text: re.fullmatch(r"<\d{1,3}(,\d{1,3}){1,3}>", text),
    ),
    "gbnf": (
        Grammar("lark", 'root ::= "a" [0-9]+ "b" | "c"'),
        lambda text: re.fullmatch(r"a[0-9]+b|c", text),
    ),
}
FREE = {"max_tokens": 24, "ignore_eos": True}


def constrained(name, seed, **params):
    """Settings of a completion with one of the grammars, greedy or seeded."""
    draws = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return {"max_tokens": 80, "grammar": GRAMMARS[name][0], **draws, **params}


def mixed(prompt, count=15):
    """Requests of all kinds, every third without a grammar."""
    requests = []
    for index in range(count):
        seed = None if index % 2 else index
        if index % 3 == 2:
            params = {**FREE, "temperature": 0.0 if seed is None else 1.0, "seed": index}
        else:
            name = list(GRAMMARS)[index % len(GRAMMARS)]
            params = constrained(name, seed, n=3 if index % 4 == 1 else 1)
        requests.append((prompt(2 + 7 * index % 50, index), params))
    return requests


def texts(outputs):
    return [
        [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]
        for output in outputs
    ]


def assert_matching(output, params):
    check = {id(grammar): check for grammar, check in GRAMMARS.values()}[id(params["grammar"])]
    for choice in output.outputs:
        assert choice.finish_reason == "stop", choice
        assert check(choice.text), choice.text


def assert_all(outputs, requests):
    for output, (_, params) in zip(outputs, requests, strict=True):
        if "grammar" in params:
            assert_matching(output, params)
        else:
            assert all(len(one.token_ids) == FREE["max_tokens"] for one in output.outputs)


def only(engine, prompt_ids, params):
    [output] = run_requests(engine, [(prompt_ids, params)])
    return output.outputs[0]
