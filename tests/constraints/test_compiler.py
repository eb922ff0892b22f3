"""Grammars of every kind are followed token by token; those that cannot be are refused in time."""

import json
import re
import threading
import time

import llguidance
import numpy as np
import pytest

from jaxinfer.constraints import GrammarCompiler, GrammarMatcher, compiler
from jaxinfer.constraints.grammar_text import MAX_BYTES
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.testing import byte_tokenizer

VOCAB_SIZE, EOS = 258, 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars():
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {EOS})


def allowed(matcher):
    """The tokens that may come next."""
    mask = np.zeros((-(-VOCAB_SIZE // 32),), np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(grammar, text):
    """How far a text is allowed: True if it may end behind its last byte."""
    matcher = GrammarMatcher(grammar)
    for byte in text.encode():
        if matcher.is_complete or byte not in allowed(matcher):
            return False
        matcher.advance(byte)
    return matcher.is_complete or EOS in allowed(matcher)


KINDS = [
    (
        Grammar("json_schema", SCHEMA),
        ['{"name":"Jo","age":3}', '{\n  "name": "é😀",\n  "age": -12\n}'],
        ['{"age":3,"name":"Jo"}', '{"name":"toolong","age":3}', '{"name":"Jo"}', "[]", ""],
    ),
    (Grammar("json_schema", True), ["1", '{"a":[null]}', '"x"'], ["x", "", "{"]),
    (Grammar("json_object"), ["{}", '{"a": {"b": 1.5e3}}'], ["[]", "1", "{", "{} "]),
    (Grammar("regex", r"\d{3}-[a-c]+"), ["123-abc", "000-c"], ["12-a", "123-", "123-d", "١٢٣-a"]),
    (Grammar("regex", "a/b|\u00e9+"), ["a/b", "éé"], ["a", "e", ""]),
    (Grammar("choice", ("yes", "no")), ["yes", "no"], ["y", "maybe", "yesno", ""]),
    (
        Grammar("choice", ("a", "ab", 'q"', "\\", "\n", "é😀", "\x01")),
        ["a", "ab", 'q"', "\\", "\n", "é😀", "\x01"],
        ["b", "abc", "q"],
    ),
    (
        Grammar("lark", 'start: "<" num ("," num)* ">"\nnum: /[0-9]{1,3}/'),
        ["<1>", "<1,22,333>"],
        ["<>", "<1,>", "<1234>"],
    ),
    (
        Grammar("lark", 'start: "call " %json {"type": "object", "required": ["x"]}'),
        ['call {"x": 1}'],
        ["call {}", "call 1"],
    ),
    (
        Grammar("lark", 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+ | "x" root?'),
        ["[1]", "[1,x,x[22]]"],
        ["[]", "[1", "[a]"],
    ),
    (Grammar("lark", json.dumps({"grammars": [{"json_schema": {"const": 7}}]})), ["7"], ["8"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), KINDS)
def test_what_matches_can_be_written_and_nothing_else(grammars, grammar, good, bad):
    compiled = grammars.compile(grammar)
    for text in good:
        assert follow(compiled, text), text
    for text in bad:
        assert not follow(compiled, text), text


def test_completions_of_one_grammar_do_not_touch_each_other(grammars):
    compiled = grammars.compile(Grammar("choice", ("ab", "cd")))
    first, second = GrammarMatcher(compiled), GrammarMatcher(compiled)
    first.advance(ord("a"))
    assert allowed(first) == {ord("b")}
    assert allowed(second) == {ord("a"), ord("c")}


def test_special_tokens_are_no_text(grammars):
    matcher = GrammarMatcher(grammars.compile(Grammar("regex", "</s>")))
    assert allowed(matcher) == {ord("<")}
    matcher = GrammarMatcher(grammars.compile(Grammar("lark", 'start: "a" <s> "b"')))
    matcher.advance(ord("a"))
    assert allowed(matcher) == {256}


# B22: what does not compile, or should not. Each is refused with what is wrong with it.


def nested(depth, wrap):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


def chain(length, link):
    """A schema whose definitions refer to each other, `length` deep."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    definitions[f"d{length}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def as_object(schema):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


SCHEMAS = [
    ({"type": "stsring"}, "Invalid type: stsring"),
    ({"type": 123}, "type must be a string"),
    ({"$ref": "#/nope"}, "'/nope' does not exist"),
    ({"$ref": "#"}, "NoExtension"),
    ({"$ref": "http://127.0.0.1:9/x.json"}, "not present in a registry"),
    ({"$ref": "file:///etc/passwd"}, "not present in a registry"),
    (nested(5000, as_object), "nests too deeply"),
    (nested(200, as_object), "recursion limit"),
    (nested(200, lambda schema: {"allOf": [schema]}), "recursion limit"),
    ({"type": "string", "pattern": "(?<=x)y"}, "look-around"),
    ({"type": "string", "pattern": r"\u{110000}"}, "not a Unicode scalar value"),
    ({"type": "string", "pattern": "a**("}, "unclosed group"),
    ({"const": "\ud800"}, "surrogate"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
    (False, "Unsatisfiable"),
    ({"enum": [f"value number {i}" for i in range(50_000)]}, f"at most {MAX_BYTES} bytes"),
    ({"not": {"type": "string"}}, "Unimplemented keys.*lenient"),
    ({"type": "string", "format": "fax"}, "Unknown format: fax.*lenient"),
    ({"type": "integer", "minimum": {1, 2}}, "holds what JSON cannot"),
    ({"type": "number", "minimum": float("nan")}, ""),
    ({"type": "object", "x-guidance": 1}, ""),
]
PATTERNS = [
    ("(", "unclosed group"),
    ("(" * 60_000, "unclosed group|nest"),
    ("(" * 60_000 + "a" + ")" * 60_000, "nest"),
    ("(a" * 60_000 + ")*" * 60_000, "nest"),
    ("[" * 60_000, "unclosed|nest"),
    (r"(a)\1", "backreferences"),
    ("(?=a)b", "look-around"),
    ("\ud800", "surrogate"),
]
GRAMMARS = [
    ("", "as GBNF it fails"),
    ("start: foo", 'unknown name: "foo"'),
    ("start: start", "NoExtension"),
    ("root ::= root", "NoExtension"),
    ('main ::= "a"', "No 'root' rule"),
    ("start: " + "(" * 60_000 + '"a"' + ")" * 60_000, "too deeply nested"),
    ("root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000, "nests too deeply"),
    ('start: A\nA: "a" A', "circular reference"),
    ("start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"', "big"),
    ('%import "/etc/passwd"\nstart: "a"', "Expected name"),
    ('start: "\ud800"', "surrogate"),
    ('{"grammars": []}', "empty grammars"),
    ('{"grammars": [{"rx": 1}]}', "must have either"),
]
BAD = [
    *((Grammar("json_schema", schema), says) for schema, says in SCHEMAS),
    *((Grammar("regex", pattern), says) for pattern, says in PATTERNS),
    *((Grammar("lark", text), says) for text, says in GRAMMARS),
    (Grammar("choice", ("\ud800",)), "surrogate"),
    (Grammar("choice", ("x" * MAX_BYTES,)), f"at most {MAX_BYTES} bytes"),
]


@pytest.mark.parametrize(("grammar", "says"), BAD)
def test_what_is_no_grammar_is_refused(grammars, grammar, says):
    began = time.monotonic()
    with pytest.raises(InvalidParameter, match=f"grammar cannot be used: .*(?:{says})") as error:
        grammars.compile(grammar)
    assert error.value.param == "grammar"
    assert len(str(error.value)) < 700
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 20


COSTLY = [
    # Minutes, and gigabytes: the process that tries it is ended.
    Grammar(
        "json_schema", {"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrstuvwxy"]}
    ),
    Grammar("json_schema", {"type": "integer", "multipleOf": 999_983}),
]


@pytest.mark.slow
@pytest.mark.parametrize("grammar", COSTLY)
def test_what_takes_too_long_is_refused_in_time(grammars, grammar, monkeypatch):
    monkeypatch.setattr("jaxinfer.constraints.isolation.TIME_LIMIT_S", 2.0)
    began = time.monotonic()
    with pytest.raises(InvalidParameter, match="does not compile within"):
        grammars.compile(grammar)
    assert time.monotonic() - began < 15
    assert follow(grammars.compile(Grammar("choice", ("next",))), "next")


# An overflow of the stack cannot be caught: it would be the end of the server.
CHAINS = [
    Grammar(
        "lark",
        "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(5_000)) + 'a5000: "x"',
    ),
    Grammar("json_schema", chain(1500, as_object)),
]


@pytest.mark.parametrize("grammar", CHAINS)
def test_long_chains_of_references_end_nothing(grammars, grammar):
    assert allowed(GrammarMatcher(grammars.compile(grammar)))


LARGE = [
    ({"type": "string", "maxLength": 10**9}, '"x"'),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}, None),
    ({"enum": [f"value {i}" for i in range(5000)]}, '"value 4999"'),
    ({"type": "string", "pattern": "^(a+)+$"}, '"aaa"'),
    ({"type": "string", "pattern": "^foo**$"}, '"foo"'),
    ({"type": "string", "pattern": "^(?:ab)*$"}, '"abab"'),
    (nested(40, as_object), '{"a":' * 40 + "1" + "}" * 40),
    (chain(100, as_object), '{"a":' * 100 + "1" + "}" * 100),
    (
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
        '{"p17": "", "p400": "x"}',
    ),
    (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": f"tool_{i}"},
                        "arguments": {
                            "type": "object",
                            "properties": {f"a{i}": {"type": "integer"}},
                        },
                    },
                    "required": ["name", "arguments"],
                }
                for i in range(200)
            ]
        },
        '{"name": "tool_187", "arguments": {"a187": 1}}',
    ),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}}, '{"next": {"next": {}}}'),
]


@pytest.mark.parametrize(("schema", "text"), LARGE)
def test_large_schemas_that_make_sense_are_followed(grammars, schema, text):
    compiled = grammars.compile(Grammar("json_schema", schema))
    assert allowed(GrammarMatcher(compiled))
    assert text is None or follow(compiled, text)


def test_the_parameter_is_named(grammars):
    with pytest.raises(InvalidParameter, match=r"^guided_regex cannot be used") as error:
        grammars.compile(Grammar("regex", "(", param="guided_regex"))
    assert error.value.param == "guided_regex"


# The cache.


def test_a_grammar_is_compiled_once(grammars):
    again = Grammar("regex", "once+", param="other")
    assert grammars.compile(Grammar("regex", "once+")) is grammars.compile(again)
    assert grammars.compile(Grammar("lark", "start: /once+/")) is not grammars.compile(again)


def test_the_order_of_properties_matters(grammars):
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    other = {**schema, "properties": dict(reversed(schema["properties"].items()))}
    assert follow(grammars.compile(Grammar("json_schema", schema)), '{"a":1,"b":2}')
    assert follow(grammars.compile(Grammar("json_schema", other)), '{"b":2,"a":1}')


def test_few_are_kept_and_the_last_used_are(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_KEPT", 3)
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {EOS})
    made = [grammars.compile(Grammar("regex", f"x{i}")) for i in range(3)]
    assert grammars.compile(Grammar("regex", "x0")) is made[0]
    grammars.compile(Grammar("regex", "x3"))
    assert len(grammars._kept) == 3
    assert grammars.compile(Grammar("regex", "x0")) is made[0]
    assert grammars.compile(Grammar("regex", "x1")) is not made[1]


def test_those_that_took_long_leave_first(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_KEPT_S", 0.0)
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {EOS})
    for i in range(3):
        grammars.compile(Grammar("regex", f"x{i}"))
        assert len(grammars._kept) == 1


def test_what_has_failed_is_not_used_again(grammars):
    grammar = Grammar("regex", "spoiled")
    spoiled = grammars.compile(grammar)
    spoiled.is_spoiled = True
    assert grammars.compile(grammar) is not spoiled


def test_many_threads_may_compile(grammars):
    found = []

    def work(number):
        found.append(grammars.compile(Grammar("regex", f"thread{number % 2}")))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(grammar) for grammar in found}) == 2


def test_a_model_without_an_end_of_sequence():
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, ())
    matcher = GrammarMatcher(grammars.compile(Grammar("choice", ("ab",))))
    for byte in b"ab":
        assert allowed(matcher) == {byte}
        matcher.advance(byte)
    assert matcher.is_complete


def test_whitespace_in_json_has_an_end(grammars):
    compiled = grammars.compile(Grammar("json_object"))
    for space in ("", " ", "\n", "\r\n", "\n" + " " * 20, "\n\t\t"):
        text = "{" + space + '"a"' + space + ":" + space + "[1," + space + "2]" + space + "}"
        assert follow(compiled, text), text
    for space in ("  ", "\n\n", "\n" + " " * 21):
        assert not follow(compiled, "{" + space + "}")
    wide = {"type": "object", "x-guidance": {"whitespace_pattern": "x{3}"}}
    assert follow(grammars.compile(Grammar("json_schema", wide)), "{xxx}")


def test_the_pattern_agrees_with_python(grammars):
    pattern = r"(?:[A-Z]{2}\d{2}(?: [0-9A-Z]{4}){2,3})|none"
    compiled = grammars.compile(Grammar("regex", pattern))
    for text in ("GB82 WEST 1234", "none", "GB82 WEST", "gb82", "DE12 0000 1111 2222 3333"):
        assert follow(compiled, text) == bool(re.fullmatch(pattern, text))


def test_what_was_prepared_the_first_grammar_finds(monkeypatch):
    made = []
    real = llguidance.LLTokenizer
    monkeypatch.setattr(
        llguidance, "LLTokenizer", lambda *args, **options: made.append(1) or real(*args, **options)
    )
    grammars = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {EOS})
    assert not made
    grammars.prepare()
    assert len(made) == 1
    assert follow(grammars.compile(Grammar("regex", "[a-c]+")), "abc")
    assert len(made) == 1
