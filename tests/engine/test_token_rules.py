"""Allowed tokens and banned words: what is sampled keeps to them, whatever else is asked for."""

import numpy as np
import pytest
from engine.builders import SPECULATION
from tiny_engine import EOS, VOCAB_SIZE

from jaxinfer.constraints import GrammarFailure, TokenRules
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"seed": 5, "max_tokens": 24, "ignore_eos": True}


def ids(words):
    """Returns the ids of a mask."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB_SIZE]).tolist()


def mask_of(rules):
    mask = np.full((-(-VOCAB_SIZE // 32),), 0xFFFFFFFF, np.uint32)
    rules.fill(mask)
    return ids(mask)


def test_masks_follow_what_was_sampled():
    rules = TokenRules([1, 2, 3, 40, 257], [(40,), (1, 2), (1, 2, 3), (3, 3)], VOCAB_SIZE)
    assert mask_of(rules) == [1, 2, 3, 257]
    rules.advance(1)
    assert mask_of(rules) == [1, 3, 257], "2 would complete a word of two tokens"
    rules.advance(2)
    assert mask_of(rules) == [1, 2, 257], "and 3 one of three"
    rules.advance(3)
    assert mask_of(rules) == [1, 2, 257]
    rules.advance(257)
    assert mask_of(rules) == [1, 2, 3, 257]
    assert not rules.is_complete


def test_words_with_tokens_the_model_lacks_are_never_written():
    rules = TokenRules([1, 2], [(VOCAB_SIZE,), (1, 5000)], VOCAB_SIZE)
    rules.advance(1)
    assert mask_of(rules) == [1, 2]


def test_nothing_left_is_a_failure_and_no_free_choice():
    only_stop = TokenRules([7, EOS], [(7,)], VOCAB_SIZE, stop_ids=[EOS], min_tokens=2)
    with pytest.raises(GrammarFailure, match="leave no token"):
        mask_of(only_stop)
    only_stop.advance(7)
    only_stop.advance(7)
    assert mask_of(only_stop) == [EOS]
    with pytest.raises(GrammarFailure):
        mask_of(TokenRules([7], [(7,)], VOCAB_SIZE))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "limits", [{}, SPECULATION, {"decode_steps": 5}, {"num_pages": 24}], ids=str
)
def test_only_allowed_tokens_are_sampled(make_engine, run, prompt, depth, params, limits):
    allowed = [65, 66, 67, 200]
    engine = make_engine(pipeline_depth=depth, **limits)
    requests = [
        (prompt(9, 1), {**params, "allowed_token_ids": allowed}),
        (prompt(20, 2), params),
        (prompt(3, 3), {**params, "allowed_token_ids": allowed[:1], "n": 2}),
    ]
    narrow, free, single = run(engine, requests)
    assert set(narrow.outputs[0].token_ids) <= set(allowed)
    assert not set(free.outputs[0].token_ids) <= set(allowed)
    assert [choice.token_ids for choice in single.outputs] == [[65] * 24] * 2
    (alone,) = run(make_engine(), requests[:1])
    assert narrow.outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_end_that_is_not_allowed_does_not_come(make_engine, run, prompt):
    params = {"temperature": 0.0, "max_tokens": 5, "logit_bias": {EOS: 100.0}}
    (output,) = run(make_engine(), [(prompt(5), {**params, "allowed_token_ids": [65]})])
    assert output.outputs[0].token_ids == [65] * 5
    (output,) = run(make_engine(), [(prompt(5), {**params, "allowed_token_ids": [65, EOS]})])
    assert output.outputs[0].token_ids == [EOS]


def test_banned_words_do_not_come(make_engine, run, prompt, depth):
    """Words of one byte and of several; each byte is a token here."""
    engine = make_engine(pipeline_depth=depth)
    ascii_only = {"allowed_token_ids": list(range(97, 101))}
    params = {**SEEDED, **ascii_only, "max_tokens": 120}
    for seed in range(4):
        request = (prompt(6, seed), {**params, "seed": seed})
        (free,) = run(engine, [request])
        text = free.outputs[0].text
        banned = [text[10:12], text[40:43]]
        (output,) = run(engine, [(request[0], {**request[1], "bad_words": banned})])
        assert len(output.outputs[0].text) == 120
        assert all(word not in output.outputs[0].text for word in banned)
        (output,) = run(engine, [(request[0], {**request[1], "bad_words": ["a", "c"]})])
        assert set(output.outputs[0].text) <= {"b", "d"}


def test_words_begin_anywhere(make_engine, run, prompt):
    """A space before a word is part of it only where the word has none of its own."""
    params = {**GREEDY, "max_tokens": 40, "allowed_token_ids": [32, 120]}
    for word in ("x", " x"):
        (output,) = run(make_engine(), [(prompt(5), {**params, "bad_words": [word]})])
        assert output.outputs[0].text == " " * 40


def test_rules_beside_a_grammar(make_engine, run, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    grammar = Grammar("regex", "[a-f]{10}")
    params = {"seed": 3, "max_tokens": 30, "grammar": grammar, "bad_words": ["a", "bc"]}
    (output,) = run(engine, [(prompt(5), params)])
    choice = output.outputs[0]
    assert choice.finish_reason == "stop"
    assert len(choice.text) == 10
    assert set(choice.text) <= set("bcdef")
    assert "bc" not in choice.text
    exclusive = {**params, "bad_words": list("abcdef")}
    with pytest.raises(InvalidParameter, match="leave no token") as refused:
        run(engine, [(prompt(5), exclusive)])
    assert (refused.value.param, refused.value.code) == ("bad_words", "unsatisfiable_constraint")
    later = {**params, "bad_words": ["a", *(f"{x}{y}" for x in "bcdef" for y in "bcdef")]}
    failed, other = run(engine, [(prompt(5), later), (prompt(6), GREEDY)])
    assert (failed.outputs[0].finish_reason, len(failed.outputs[0].text)) == ("error", 1)
    assert "leave no token" in failed.outputs[0].error
    assert other.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(params, param):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**params)
    assert caught.value.param == param


def test_ids_outside_the_vocabulary():
    SamplingParams(allowed_token_ids=[257]).validate_for(VOCAB_SIZE)
    with pytest.raises(InvalidParameter, match="vocabulary ends at 257"):
        SamplingParams(allowed_token_ids=[258]).validate_for(VOCAB_SIZE)
