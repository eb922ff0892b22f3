"""Stop strings against a naive search over the whole text (B02)."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import Detokenizer, StopMatcher


def run(pieces, stops, include_stop=False):
    """Returns the emitted pieces (the flush last) and the stop string."""
    matcher = StopMatcher(stops, include_stop)
    emitted = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        emitted.append(text)
        if matched is not None:
            break
    emitted.append(matcher.flush())
    return emitted, matcher.matched


def naive(text, stops, include_stop):
    """The stop string that is complete first, the longest of several ending together."""
    found = [
        (text.find(stop) + len(stop), -len(stop), stop) for stop in stops if text.find(stop) >= 0
    ]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include_stop else end - len(stop)], stop


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "matched"),
    [
        (["A ", "B ", "C ", "O ", "P ", "Q ", "R"], ["O P Q"], "A B C ", "O P Q"),
        (["ab\ncd"], ["\n"], "ab", "\n"),
        (["xx", "EN"], ["END"], "xxEN", None),
        (["fo", "ob", "ar"], ["foo", "foobar"], "", "foo"),
        (["fo", "ob", "ar"], ["foobar", "foo"], "", "foo"),
        (["xab", "cd"], ["abcdX", "cd"], "xab", "cd"),
        (["aab"], ["ab", "aab"], "", "aab"),
        (["aaa", "ab"], ["aab"], "aa", "aab"),
        (["abab", "abac"], ["abac"], "abab", "abac"),
        ([], ["x"], "", None),
        (["", "a", ""], ["b"], "a", None),
        (["abc"], [], "abc", None),
    ],
)
def test_output_ends_before_the_first_complete_match(pieces, stops, expected, matched):
    emitted, stop = run(pieces, stops)
    assert ("".join(emitted), stop) == (expected, matched)
    emitted, stop = run(pieces, stops, include_stop=True)
    assert ("".join(emitted), stop) == (expected + (matched or ""), matched)


def test_a_stop_string_split_inside_a_character():
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode("caf\u00e9 x")]
    assert "".join(run(pieces, ["\u00e9"])[0]) == "caf"


def test_text_is_released_as_soon_as_no_stop_string_can_begin_in_it():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece)[0] for piece in ("aE", "N", "x", "EE", "ND")] == [
        "a",
        "",
        "ENx",
        "E",
        "",
    ]
    assert matcher.matched == "END"
    assert matcher.push("more") == ("", "END")
    assert matcher.flush() == ""


@settings(deadline=None)  # the cores are shared
@given(
    text=st.text("aab\n", max_size=40),
    stops=st.lists(st.text("aab\n", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 40)),
    include_stop=st.booleans(),
)
def test_equals_a_search_over_the_whole_text(text, stops, cuts, include_stop):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(bounds)]
    emitted, matched = run(pieces, stops, include_stop)
    expected, stop = naive(text, stops, include_stop)
    assert ("".join(emitted), matched) == (expected, stop)
    # What was streamed at any time never reaches into what turned out to be the stop string.
    assert all(expected.startswith("".join(emitted[:count])) for count in range(len(emitted) + 1))


def test_time_is_linear():
    stop = "a" * 2000 + "b"
    start = time.perf_counter()
    emitted, _ = run(["a"] * 50_000, [stop])
    assert len("".join(emitted)) == 50_000
    assert time.perf_counter() - start < 5  # 0.1 s; comparing at every position takes minutes


@pytest.mark.parametrize("stop", ["", "\ud800"])
def test_impossible_stop_strings_are_refused(stop):
    with pytest.raises(ValueError, match="a stop string"):
        StopMatcher(["ok", stop])
