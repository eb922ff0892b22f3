"""Reading answers: each family's calls, reasoning, and what is neither."""

import json

import pytest
from text.tool_call_cases import CASES, NO_CALLS, OSLO, TOOLS, hermes

from jaxinfer.text.tool_calls import (
    FORMATS,
    AnswerParser,
    AnswerSyntax,
    CallDelta,
    Markers,
    Reasoning,
    ReasoningTags,
    Text,
    fold,
)

BY_NAME = {form.name: form for form in FORMATS}
THINK = ReasoningTags("<think>", "</think>")


def syntax_of(name, **changes):
    return AnswerSyntax(calls=BY_NAME[name], tools=TOOLS, **changes)


def events(syntax, *pieces):
    parser = AnswerParser(syntax)
    return [event for piece in pieces for event in parser.push(piece)] + parser.finish()


def read(syntax, *pieces):
    return fold(events(syntax, *pieces))


@pytest.mark.parametrize(("name", "text", "outside", "calls"), CASES)
def test_calls_of_each_family(name, text, outside, calls):
    message = read(syntax_of(name), text)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == calls
    assert (message.text, message.reasoning) == (outside, "")
    assert read(syntax_of(name), *text) == message


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_only_looks_like_a_call_is_text(name, text):
    message = read(syntax_of(name), text)
    assert (message.text, message.calls) == (text, [])
    assert read(syntax_of(name), *text) == message


def test_a_call_begins_as_soon_as_it_is_certain_and_its_arguments_follow():
    parser = AnswerParser(syntax_of("hermes"))
    assert parser.push('Hi <tool_call>\n{"name": "get_weather", "arguments": ') == [Text("Hi ")]
    assert parser.push('{"city"') == [CallDelta(0, "get_weather", '{"city"')]
    assert parser.push(': "Os') == [CallDelta(0, None, ': "Os')]
    assert parser.push('lo"}') == [CallDelta(0, None, 'lo"}')]
    assert parser.push("}\n</tool_call>\n<tool") == []
    assert parser.push('_call>{"name": "list_files", "arguments": {}}') == [
        CallDelta(1, "list_files", "{}")
    ]
    assert parser.finish() == []


def test_text_is_passed_on_at_once_and_only_possible_markers_wait():
    parser = AnswerParser(syntax_of("hermes"))
    assert parser.push("a <") == [Text("a ")]
    assert parser.push("b") == [Text("<b")]
    assert parser.push(" <tool_") == [Text(" ")]
    assert parser.finish() == [Text("<tool_")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # The text ends within the arguments: what there is of them.
        (hermes("get_weather", '{"city": "Os').split("}")[0], '{"city": "Os'),
        # Broken, but closed: passed on as written. It was on its way before it broke.
        (hermes("get_weather", '{"city": Oslo}'), '{"city": Oslo}'),
        (hermes("get_weather", '{"city": "Oslo}'), '{"city": "Oslo}}\\n</tool_call>'),
        # Bare control characters are what JSON forbids and models write.
        (hermes("get_weather", '{"city": "a\nb\tc\\\nd"}'), '{"city": "a\\nb\\tc\\\\nd"}'),
    ],
)
def test_broken_arguments_stay_with_their_call(text, arguments):
    [call] = read(syntax_of("hermes"), text).calls
    assert (call.name, call.arguments) == ("get_weather", arguments)


def test_white_space_between_calls_is_no_text_and_all_other_is():
    call = hermes("list_files", "{}")
    read_text = lambda text: read(syntax_of("hermes"), text).text
    assert read_text(f"\n\n{call}\n\n{call}\n") == ""
    assert read_text(f"a\n{call}\n\nb\n{call}\n c \n") == "a\n\n\nb\n\n c \n"
    assert read_text("\n a \n") == "\n a \n"
    assert read_text(" \n ") == " \n "
    assert read_text('<tool_call>{"name": "list_files"}\n b') == "\n b"


@pytest.mark.parametrize(("end", "text"), [("", ""), ("\n</tool_", ""), ("</tool_x", "</tool_x")])
def test_an_end_marker_that_the_end_cuts_is_no_text(end, text):
    call = '<tool_call>{"name": "list_files", "arguments": {}}'
    message = read(syntax_of("hermes"), call + end)
    assert (len(message.calls), message.text) == (1, text)
    assert read(syntax_of("hermes"), *call, *end) == message


def test_only_one_call():
    call = hermes("list_files", "{}")
    syntax = syntax_of("hermes", only_one_call=True)
    message = read(syntax, hermes("get_weather", '{"city": "Oslo"}') + call + "x" + call)
    assert [(each.name, json.loads(each.arguments)) for each in message.calls] == [OSLO]
    assert message.text == "x"


def test_without_tools_or_format_nothing_is_a_call():
    text = f" {hermes('list_files', '{}')}\n"
    assert read(AnswerSyntax(), text).text == text
    assert read(AnswerSyntax(calls=BY_NAME["hermes"]), text).text == text


REASONING = [
    ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
    ("\n<think>a</think>b</think><think>c", "a", "b</think><think>c"),
    ("<think>\n\n</think>\n\nYes.\n", "", "Yes.\n"),
    ("<think>never closed </thin", "never closed </thin", ""),
    ("Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    ("<thinking>", "", "<thinking>"),
    ("<thi", "", "<thi"),
]


@pytest.mark.parametrize(("text", "reasoning", "outside"), REASONING)
def test_reasoning_at_the_beginning(text, reasoning, outside):
    message = read(AnswerSyntax(reasoning=THINK), text)
    assert (message.reasoning, message.text) == (reasoning, outside)
    assert read(AnswerSyntax(reasoning=THINK), *text) == message


@pytest.mark.parametrize("again", ["", "<think>\n"])
def test_reasoning_that_the_prompt_opened(again):
    syntax = AnswerSyntax(reasoning=THINK, starts_in_reasoning=True)
    message = read(syntax, f"{again}Hm.</think>\nYes.")
    assert (message.reasoning, message.text) == ("Hm.", "Yes.")
    assert read(syntax, "Hm").reasoning == "Hm"


def test_reasoning_comes_as_it_is_written():
    parser = AnswerParser(AnswerSyntax(reasoning=THINK))
    assert parser.push("<think>\n") == []
    assert parser.push("a b ") == [Reasoning("a b")]
    assert parser.push("c</th") == [Reasoning(" c")]
    assert parser.push("ink>\n") == []
    assert parser.push("\nd") == [Text("d")]


def test_reasoning_and_calls():
    call = hermes("list_files", "{}")
    syntax = syntax_of("hermes", reasoning=THINK)
    message = read(syntax, f"<think>First {call}?</think>\n\n{call}")
    assert (message.reasoning, message.text) == (f"First {call}?", "")
    assert [each.name for each in message.calls] == ["list_files"]
    # A call without marker begins where the reasoning has ended.
    bare = syntax_of("llama3_json", reasoning=THINK)
    message = read(bare, '<think>x</think>\n{"name": "list_files", "parameters": {}}')
    assert [each.name for each in message.calls] == ["list_files"]


def test_special_tokens_texts_are_dropped():
    dropped = Markers(["<|im_end|>", "<|x|>", "<|x|>y"])
    syntax = syntax_of("hermes", dropped=dropped)
    text = "a<|im<|x|>_end|>b<|im_end|><|x|><|x" + hermes("list_files", "{}")
    for pieces in ([text], text):
        message = read(syntax, *pieces)
        assert (message.text, len(message.calls)) == ("a<|im_end|>b<|x", 1)


@pytest.mark.parametrize("text", ["ab", "abc", "abcd", "xabd", "bcd", "aabcb", "ab" * 3])
def test_of_overlapping_markers_the_first_and_then_the_longest_is_found(text):
    markers = Markers(["ab", "abcd", "bce", "xa"])
    whole = markers.search(text, 0, True)
    for end in range(len(text)):
        place, marker = markers.search(text[:end], 0, False)
        if marker:
            assert (place, marker) == whole
        else:
            assert place <= whole[0]
    assert Markers([]).search(text, 0, False) == (len(text), "")


def test_much_text_is_read_in_linear_time():
    syntax = syntax_of("hermes")
    nested = '<tool_call>{"arguments": {"a": "' * 20_000
    assert read(syntax, nested).text == nested
    assert read(syntax, "<tool_call>" * 50_000).text == "<tool_call>" * 50_000
    deep = hermes("get_weather", '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}")
    assert len(read(syntax, deep).calls[0].arguments) == 100_007


def test_what_is_held_back_is_bounded(monkeypatch):
    monkeypatch.setattr("jaxinfer.text.tool_calls.source.MAX_UNDECIDED", 100)
    long = '<tool_call>{"arguments": {"a": "%s"}, "name": "list_files"}</tool_call>'
    parser = AnswerParser(syntax_of("hermes"))
    assert parser.push((long % ("x" * 200))[:150])
    assert len(read(syntax_of("hermes"), long % ("x" * 20)).calls) == 1
    text = long % ("x" * 200)
    assert read(syntax_of("hermes"), text).text == text
    # What follows is read again, wherever reading had come to.
    text = long[:-30] % ("x" * 80) + hermes("list_files", "{}")
    assert len(read(syntax_of("hermes"), text).calls) == 1
    assert read(syntax_of("hermes"), *text) == read(syntax_of("hermes"), text)
