"""Grammars of calls, compiled: what they accept is what the parser reads as calls, and no more."""

import json

import pytest
from text.test_tool_calls import BY_NAME, THINK, read
from text.tool_call_cases import LIST, OSLO, tokenizer_with

from jaxinfer.constraints import GrammarCompiler
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text.tool_calls import AnswerSyntax
from jaxinfer.text.tool_calls.call_grammar import MAX_REQUIRED_CALLS, WHITE_SPACE, answer_grammar
from jaxinfer.text.tool_calls.teaching import written_calls

EOS = 257
OPTIONS = {"whitespace_pattern": WHITE_SPACE}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "days": {"type": "integer"},
            "city": {"type": "string"},
            "units": {"$ref": "#/$defs/Units"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Units": {"enum": ["celsius", "kelvin"]}},
    },
    "list_files": {},
}
SPECIAL = ("[TOOL_CALLS]", "<think>", "</think>")
BYTES = GrammarCompiler(byte_tokenizer(), 258, [EOS])
SPECIALS = tokenizer_with(SPECIAL)
CALLS = [OSLO, LIST]
BAD = [("get_weather", {"days": 3})]
REASONING = [
    (None, False, ""),
    (THINK, False, ""),
    (THINK, False, "<think>So: <tool>\n</think>\n\n"),
    (THINK, True, "So: {[\n</think>\n\n"),
]


def follows(grammar, ids, compiler=BYTES):
    """Whether the grammar lets these tokens be written, and the answer end there."""
    state = compiler.compile(Grammar("lark", grammar)).first_state()
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def accepts(grammar, text):
    return follows(grammar, list(text.encode()))


def syntax_of(name, **changes):
    return AnswerSyntax(calls=BY_NAME[name], tools=TOOLS, **changes)


@pytest.mark.parametrize(("tags", "is_open", "before"), REASONING)
@pytest.mark.parametrize("name", BY_NAME)
def test_required_calls(name, tags, is_open, before):
    syntax = syntax_of(name, reasoning=tags, starts_in_reasoning=is_open)
    grammar = answer_grammar(syntax, {}, is_required=True)
    text = before + written_calls(BY_NAME[name], CALLS)
    assert accepts(grammar, text)
    message = read(syntax, text)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == CALLS
    assert message.text == ""
    assert not accepts(grammar, before)
    assert not accepts(grammar, before + "Hello")
    assert not accepts(grammar, before + written_calls(BY_NAME[name], BAD))
    assert not accepts(grammar, before + written_calls(BY_NAME[name], [("unknown", {})]))
    assert not accepts(grammar, text + " Done.")


@pytest.mark.parametrize("name", BY_NAME)
def test_only_one_call(name):
    form = BY_NAME[name]
    grammar = answer_grammar(syntax_of(name, only_one_call=True), {}, is_required=True)
    assert accepts(grammar, written_calls(form, [OSLO]))
    assert not accepts(grammar, written_calls(form, CALLS))


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_that_are_required_come_to_an_end(name):
    grammar = answer_grammar(syntax_of(name), {}, is_required=True)
    assert accepts(grammar, written_calls(BY_NAME[name], [LIST] * MAX_REQUIRED_CALLS))
    assert not accepts(grammar, written_calls(BY_NAME[name], [LIST] * (MAX_REQUIRED_CALLS + 1)))


@pytest.mark.parametrize(("tags", "is_open", "before"), REASONING)
@pytest.mark.parametrize("name", BY_NAME)
def test_text_with_calls_that_fit(name, tags, is_open, before):
    form = BY_NAME[name]
    syntax = syntax_of(name, reasoning=tags, starts_in_reasoning=is_open)
    grammar = answer_grammar(syntax, {})
    calls = written_calls(form, CALLS)
    assert accepts(grammar, before + "Hello { [ you.")
    assert accepts(grammar, before + calls)
    assert not accepts(grammar, before + written_calls(form, BAD))
    if not form.bare:
        assert accepts(grammar, f"{before}Hello.\n{calls}\nSo.")
        assert not accepts(grammar, f"{before}Hello. {written_calls(form, BAD)}")


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize(
    ("other", "right", "wrong"),
    [
        ('%json {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], '
         f'"x-guidance": {json.dumps(OPTIONS)}}}', '{"a": 1}', '{"b": 1}'),
        ('"yes" | "no"', "yes", "maybe"),
    ],
)  # fmt: skip
def test_calls_or_what_was_asked_for(name, other, right, wrong):
    grammar = answer_grammar(syntax_of(name), {}, other=other)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)
    assert accepts(grammar, written_calls(BY_NAME[name], [OSLO]))
    assert not accepts(grammar, written_calls(BY_NAME[name], BAD))


def test_reasoning_before_what_was_asked_for():
    grammar = answer_grammar(AnswerSyntax(reasoning=THINK), {}, other='"yes"')
    assert accepts(grammar, "yes")
    assert accepts(grammar, "<think>no\n</think>\n\nyes")
    assert not accepts(grammar, "<think>no</think>no")


@pytest.mark.parametrize("is_required", [True, False])
def test_markers_that_are_special_tokens_are_tokens(is_required):
    special = {text: SPECIALS.token_id(text) for text in SPECIAL}
    syntax = syntax_of("mistral", reasoning=THINK)
    grammar = answer_grammar(syntax, special, is_required=is_required)
    compiler = GrammarCompiler(SPECIALS, SPECIALS.vocab_size, [EOS])
    for text in ("", "<think>Hm.</think>\n"):
        ids = SPECIALS.encode(text + written_calls(BY_NAME["mistral"], CALLS))
        assert SPECIALS.token_id("[TOOL_CALLS]") in ids
        assert follows(grammar, ids, compiler)
    spelled = list(written_calls(BY_NAME["mistral"], BAD).encode())
    assert follows(grammar, spelled, compiler) is not is_required  # as any other text


def test_schemas_that_are_not_fully_understood():
    odd = {"f": {"type": "object", "properties": {"a": {"type": "string", "format": "wild"}}}}
    syntax = AnswerSyntax(calls=BY_NAME["hermes"], tools=odd)
    lenient = answer_grammar(syntax, {}, is_required=True)
    assert accepts(lenient, written_calls(BY_NAME["hermes"], [("f", {"a": "x"})]))
    with pytest.raises(InvalidParameter, match="wild"):
        BYTES.compile(Grammar("lark", answer_grammar(syntax, {}, strict=frozenset({"f"}))))


@pytest.mark.parametrize(
    ("parameters", "fits", "does_not"),
    [
        ({"properties": {}}, [{}], [{"a": 1}]),
        ({"properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"properties": {}, "additionalProperties": True}, [{}, {"a": 1}], [5]),
        ({"type": "object"}, [{}, {"a": 1}], [[]]),
        ({}, [{}, {"a": 1}], []),
    ],
)
def test_arguments_that_a_function_does_not_have(parameters, fits, does_not):
    syntax = AnswerSyntax(calls=BY_NAME["hermes"], tools={"f": parameters})
    grammar = answer_grammar(syntax, {}, is_required=True)
    assert all(accepts(grammar, written_calls(BY_NAME["hermes"], [("f", each)])) for each in fits)
    for each in does_not:
        assert not accepts(grammar, written_calls(BY_NAME["hermes"], [("f", each)]))


def test_python_arguments_come_required_first_and_others_if_wanted():
    grammar = answer_grammar(syntax_of("pythonic"), {}, is_required=True)
    for arguments in ('city="a"', 'city="a", days=1', 'city="a", days=1, units="kelvin"'):
        assert accepts(grammar, f"[get_weather({arguments})]")
    for arguments in ("", "days=1", 'city="a", city="a"', 'city="a",', 'city="a", units="x"'):
        assert not accepts(grammar, f"[get_weather({arguments})]")
