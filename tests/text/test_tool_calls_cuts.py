"""However an answer is cut into pieces, the same comes out, and nothing of its text is lost."""

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text.test_tool_calls import BY_NAME, THINK, read, syntax_of
from text.tool_call_cases import CASES, NO_CALLS, TOOLS

from jaxinfer.text.tool_calls import AnswerSyntax, Markers

_ALL = [text for _, text, *_ in CASES] + [text for _, text in NO_CALLS]
_MARKERS = sorted({marker for form in BY_NAME.values() for marker in form.markers})
_FRAGMENTS = [
    *_MARKERS,
    *("<think>", "</think>", "<|im_end|>", "<function=", "<parameter=", "</parameter>", ">"),
    *TOOLS,
    *('{"name": "', '", "arguments": {', '"', "\\", "{", "}", "[", "]", "(", ")", "=", ",", ":"),
    *("'", " ", "\n", ";", "a", "1", "name", "city=", "null", "True", "```json", "ü", "🌶️", "\t"),
]
texts = st.lists(
    st.sampled_from(_FRAGMENTS) | st.sampled_from(_ALL) | st.text(max_size=3), max_size=12
).map("".join)
# Pieces of real answers joined at random: near misses of every kind.
torn = st.lists(
    st.tuples(st.sampled_from(_ALL), st.integers(0, 200), st.integers(0, 200)).map(
        lambda cut: cut[0][min(cut[1:]) : max(cut[1:])]
    ),
    max_size=4,
).map("".join)
syntaxes = st.builds(
    lambda form, reasoning, starts, one, dropped: AnswerSyntax(
        reasoning=THINK if reasoning else None,
        starts_in_reasoning=reasoning and starts,
        calls=None if form is None else BY_NAME[form],
        tools=TOOLS,
        only_one_call=one,
        dropped=Markers(["<|im_end|>"] if dropped else []),
    ),
    st.sampled_from([None, *BY_NAME]),
    *[st.booleans()] * 4,
)


def pieces(text, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=500, deadline=None)
@given(syntaxes, texts | torn, st.lists(st.integers(0, 400), max_size=8))
@example(syntax_of("hermes"), "<tool_call>" * 3, [11, 12])
def test_cuts_change_nothing(syntax, text, cuts):
    whole = read(syntax, text)
    assert read(syntax, *pieces(text, cuts)) == whole
    assert read(syntax, *text) == whole


@settings(max_examples=200, deadline=None)
@given(syntaxes, texts | torn)
def test_cuts_change_nothing_where_little_may_be_held_back(syntax, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.text.tool_calls.source.MAX_UNDECIDED", 25)
        assert read(syntax, *text) == read(syntax, text)


@settings(max_examples=500, deadline=None)
@given(syntaxes, texts | torn)
def test_what_is_neither_reasoning_nor_call_stays_text(syntax, text):
    message = read(syntax, text)
    if not message.calls and not syntax.starts_in_reasoning and "<think>" not in text:
        drops = syntax.dropped.search("<|im_end|>", 0, True)[1]
        assert message.text == (text.replace(drops, "") if drops else text)
    # Whatever is text was there, in this order.
    place = 0
    for char in message.text.strip():
        place = text.index(char, place) + 1


PLAIN = st.text(st.characters(exclude_characters="<[{", exclude_categories=["Cs"]), max_size=20)
MARKED = [case for case in CASES if case[0] in ("hermes", "qwen_coder", "lfm2")]


def letters(text):
    return re.sub(r"[ \t\r\n]", "", text)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MARKED), st.lists(PLAIN, min_size=2, max_size=4))
def test_text_around_calls_is_kept_and_every_call_is_found(case, around):
    name, call, outside, calls = case
    message = read(syntax_of(name), call.join(around))
    assert len(message.calls) == len(calls) * (len(around) - 1)
    assert letters(message.text) == letters(outside.join(around))
