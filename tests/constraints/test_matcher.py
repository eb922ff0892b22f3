"""One completion's place in its grammar: the end of the sequence, and what goes wrong."""

import numpy as np
import pytest

from jaxinfer.constraints import CompiledGrammar, GrammarCompiler, GrammarFailure, GrammarMatcher
from jaxinfer.grammar import Grammar
from jaxinfer.testing import byte_tokenizer

VOCAB_SIZE, EOS = 258, 257
NUM_WORDS = 9


@pytest.fixture(scope="module")
def grammars():
    return GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, {EOS})


@pytest.fixture
def matcher(grammars):
    def make(kind, value, **options):
        return GrammarMatcher(grammars.compile(Grammar(kind, value)), **options)

    return make


def allowed(matcher):
    mask = np.full((NUM_WORDS,), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def write(matcher, text):
    for byte in text.encode():
        assert byte in allowed(matcher)
        matcher.advance(byte)


def test_the_end_comes_only_where_the_text_matches(matcher):
    matcher = matcher("regex", "ab*c?")
    assert allowed(matcher) == [ord("a")]
    write(matcher, "a")
    assert allowed(matcher) == [ord("b"), ord("c"), EOS]
    assert not matcher.is_complete
    write(matcher, "bbc")
    assert matcher.is_complete


def test_complete_is_known_before_an_end_is_sampled(matcher):
    matcher = matcher("json_schema", {"const": {"a": 1}})
    write(matcher, '{"a":1')
    assert not matcher.is_complete
    write(matcher, "}")
    assert matcher.is_complete


def test_an_early_end_is_banned_while_anything_else_may_come(matcher):
    matcher = matcher("regex", "a*|b", min_tokens=3)
    assert allowed(matcher) == [ord("a"), ord("b")]
    write(matcher, "aa")
    assert allowed(matcher) == [ord("a")]
    write(matcher, "a")
    assert allowed(matcher) == [ord("a"), EOS]


def test_a_text_that_must_end_ends_however_short(matcher):
    # Of its empty text a grammar tells only by its mask that nothing may follow.
    matcher = matcher("regex", "", min_tokens=5, ignore_eos=True)
    assert allowed(matcher) == [EOS]


def test_an_end_that_is_to_be_ignored_is_banned(matcher):
    matcher = matcher("regex", "a*", ignore_eos=True)
    for _ in range(5):
        assert allowed(matcher) == [ord("a")]
        write(matcher, "a")


def test_a_token_that_may_not_come_is_a_failure(grammars):
    compiled = grammars.compile(Grammar("regex", "secret"))
    matcher = GrammarMatcher(compiled)
    write(matcher, "secr")
    with pytest.raises(GrammarFailure, match="may not come next") as failure:
        matcher.advance(ord("x"))
    assert "secr" not in str(failure.value)
    assert compiled.is_spoiled
    with pytest.raises(GrammarFailure):
        matcher.fill(np.zeros((NUM_WORDS,), np.uint32))


class Failing:
    """Stands in for llguidance's matcher, whose mask allows the end where it fails."""

    def __init__(self, error):
        self.error = error

    def deep_copy(self):
        return self

    def unsafe_compute_mask_ptr(self, address, size):
        pass  # zeros

    def is_error(self):
        return bool(self.error)

    def get_error(self):
        return self.error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("Too many items (limit 7; mask) <non-verbose/>", r"no further: Too many items"),
        ("", "none"),
    ],
)
def test_a_mask_that_cannot_be_had_or_is_empty_is_a_failure(error, says):
    matcher = GrammarMatcher(CompiledGrammar(Failing(error), VOCAB_SIZE, [EOS]))
    with pytest.raises(GrammarFailure, match=says) as failure:
        matcher.fill(np.full((NUM_WORDS,), 0xFFFFFFFF, np.uint32))
    assert "<" not in str(failure.value)


def test_a_dead_end_of_the_vocabulary_is_a_failure():
    # No token of these has the byte that must come.
    grammars = GrammarCompiler(byte_tokenizer(), 100, ())
    matcher = GrammarMatcher(grammars.compile(Grammar("regex", "az")))
    with pytest.raises(GrammarFailure):
        matcher.advance(ord("a")) or matcher.fill(np.zeros((4,), np.uint32))
