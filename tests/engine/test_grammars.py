"""Completions that must match a grammar: they do, whatever else runs, and others do not notice."""

import re

import jax
import numpy as np
import pytest
from engine.builders import EOS, NUM_ROWS, SPECULATION, run_requests, run_schedule
from engine.grammars import (
    FREE,
    GRAMMARS,
    PATTERN,
    assert_all,
    assert_matching,
    constrained,
    mixed,
    only,
    texts,
)

from jaxinfer.grammar import Grammar
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

MODELS = pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: _events.append(event) if event.startswith("/jax/core/compile") else None
)


@MODELS
def test_all_match_and_neither_company_nor_depth_matters(make_engine, prompt, model_type):
    """Alone, together at both depths, and in a pool so small that sequences are preempted."""
    requests = mixed(prompt)
    alone = run_requests(make_engine(model_type), requests, together=False)
    assert_all(alone, requests)
    for depth in (0, 1):
        for num_pages in (120, 45):
            engine = make_engine(
                model_type, pipeline_depth=depth, num_pages=num_pages, decode_steps=5
            )
            _events.clear()
            assert texts(run_requests(engine, requests)) == texts(alone)
            assert _events == []
            assert (engine.stats().num_preemptions > 0) == (num_pages == 45)


def test_others_write_what_they_write_without_them(make_engine, prompt, depth):
    """Also with drafts and several steps at once, which those with a grammar do without."""
    free = [(prompt(5 + 9 * i, i), {**FREE, "temperature": 1.0, "seed": i}) for i in range(4)]
    alone = run_requests(make_engine(), free)
    held = [(prompt(9, 40 + i), constrained(name, i)) for i, name in enumerate(GRAMMARS)]
    for limits in ({}, {"decode_steps": 5}, SPECULATION):
        engine = make_engine(pipeline_depth=depth, max_num_seqs=NUM_ROWS, **limits)
        outputs = run_requests(engine, [*free, *held])
        assert texts(outputs[:4]) == texts(alone)
        assert_all(outputs[4:], held)


def test_a_warm_prefix_changes_nothing(make_engine, prompt, depth):
    engine = make_engine(prefix_cache=True, pipeline_depth=depth)
    requests = [(prompt(40, 1), constrained(name, seed)) for name in GRAMMARS for seed in (None, 3)]
    cold = run_requests(make_engine(), requests, together=False)
    run_requests(engine, requests[:1])
    warm = run_requests(engine, requests)
    assert texts(warm) == texts(cold)
    assert all(output.num_cached_tokens == 36 for output in warm)


def test_siblings_go_their_own_ways(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    [output] = run_requests(engine, [(prompt(7), constrained("json_schema", 5, n=9))])
    assert_matching(output, {"grammar": GRAMMARS["json_schema"][0]})
    assert len({one.text for one in output.outputs}) > 3


def test_requests_that_come_and_go(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth, num_pages=60)
    requests = mixed(prompt, 12)
    alone = run_requests(make_engine(), requests, together=False)
    departures = {1: 9, 3: 4, 8: 16}
    outputs = run_schedule(
        engine, requests, arrivals=[3 * i for i in range(12)], departures=departures
    )
    kept = [index for index in range(12) if index not in departures]
    assert texts([outputs[index] for index in kept]) == texts([alone[index] for index in kept])


# Where a text ends.


def test_it_ends_with_the_last_token_of_the_grammar(make_engine, prompt, depth):
    """No end of the sequence is sampled behind it, and none is counted."""
    engine = make_engine(pipeline_depth=depth)
    choice = only(engine, prompt(4), constrained("json_schema", None))
    assert bytes(choice.token_ids).decode() == choice.text
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_an_end_may_be_sampled_where_the_text_matches_and_only_there(make_engine, prompt, depth):
    # An end of the sequence is what the model wants most.
    wish = {"logit_bias": {EOS: 100.0}, "temperature": 0.0, "max_tokens": 20}
    engine = make_engine(pipeline_depth=depth)
    choice = only(engine, prompt(4), {**wish, "grammar": Grammar("regex", "abc(de)*")})
    assert (choice.text, choice.token_ids[-1]) == ("abc", EOS)
    assert choice.finish_reason == "stop"
    choice = only(engine, prompt(4), {**wish, "grammar": Grammar("regex", "")})
    assert (choice.text, choice.token_ids) == ("", [EOS])


@pytest.mark.parametrize("options", [{"min_tokens": 8}, {"ignore_eos": True}])
def test_the_end_can_be_put_off_as_long_as_the_grammar_allows(make_engine, prompt, depth, options):
    wish = {"logit_bias": {EOS: 100.0}, "temperature": 0.0, "max_tokens": 20, **options}
    engine = make_engine(pipeline_depth=depth)
    choice = only(engine, prompt(4), {**wish, "grammar": Grammar("regex", "a*")})
    assert choice.text == "a" * (8 if "min_tokens" in options else 20)
    choice = only(engine, prompt(4), {**wish, "grammar": Grammar("choice", ("abc", "abcd"))})
    assert (choice.text, choice.finish_reason) == ("abcd", "stop")


def test_too_few_tokens_cut_it_short(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    cut = only(engine, prompt(4), constrained("json_schema", None, max_tokens=5))
    whole = only(engine, prompt(4), constrained("json_schema", None))
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)
    exact = only(
        engine, prompt(4), constrained("json_schema", None, max_tokens=len(whole.token_ids))
    )
    assert (exact.text, exact.finish_reason) == (whole.text, "stop")


def test_stop_strings_and_stop_ids_still_end_it(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    stopped = only(engine, prompt(4), constrained("json_schema", None, stop=['"size"']))
    assert stopped.text.endswith(",")
    assert stopped.stop_reason == '"size"'
    stopped = only(engine, prompt(4), constrained("json_schema", None, stop_token_ids=[ord(":")]))
    assert (stopped.text, stopped.stop_reason) == ('{"age"', ord(":"))


def test_bias_and_penalties_choose_among_what_is_allowed(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    bias = {ord("n"): 50.0, ord("x"): 100.0, ord("y"): -100.0}
    choice = only(engine, prompt(4), constrained("choice", None, logit_bias=bias))
    assert choice.text in ("no", "no way")
    params = constrained("regex", 3, repetition_penalty=1e3, presence_penalty=2.0)
    choice = only(engine, prompt(4), params)
    assert re.fullmatch(PATTERN, choice.text)


def test_numbers_reported_are_those_without_the_grammar(make_engine, prompt, depth):
    """Log-probabilities are of the raw logits, of tokens that may not come too."""
    engine = make_engine(pipeline_depth=depth)
    ids = prompt(6)
    choice = only(engine, ids, constrained("choice", None, logprobs=3))
    scores = {"max_tokens": 0, "prompt_logprobs": 3}
    [scored] = run_requests(engine, [(ids + choice.token_ids, scores)])
    for mine, raw in zip(choice.logprobs, scored.prompt_logprobs[len(ids) :], strict=True):
        assert mine.token_id == raw.token_id
        assert mine.logprob == pytest.approx(raw.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in raw.top]
    assert any(entry.top[0][0] != entry.token_id for entry in choice.logprobs)


def test_scoring_alone_samples_nothing(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    params = {"max_tokens": 0, "prompt_logprobs": 0, "grammar": GRAMMARS["regex"][0]}
    [output] = run_requests(engine, [(prompt(9), params)])
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == 9


# What it costs.


def test_a_step_without_grammars_hands_over_the_same_zeros(make_engine, prompt, monkeypatch, depth):
    engine = make_engine(pipeline_depth=depth)
    given = []
    for key, program in engine.runner._executables.items():

        def watch(*arguments, key=key, program=program):
            given.append((key, arguments[3:]))
            return program(*arguments)

        monkeypatch.setitem(engine.runner._executables, key, watch)
    run_requests(engine, [(prompt(4), FREE), (prompt(20, 1), FREE)])
    assert given
    for (kind, _), masks in given:
        assert len(masks) == (kind != "decode_k")
        assert all(isinstance(mask, jax.Array) and not mask.any() for mask in masks)
    assert len({id(mask) for _, masks in given for mask in masks}) <= 3
    given.clear()
    run_requests(engine, [(prompt(4), constrained("choice", None))])
    assert all(isinstance(masks[0], np.ndarray) for _, masks in given[:1])
    assert all(kind != "decode_k" for (kind, _), _ in given)


def test_what_does_not_depend_on_the_last_token_is_done_while_it_is_sampled(make_engine, prompt):
    """At depth 1 a step is planned while the one before it runs, and starts once that is read."""
    engine = make_engine(pipeline_depth=1)
    engine.add(EngineRequest("r", tuple(prompt(3)), SamplingParams(**constrained("regex", 1))))
    engine.start_step()
    engine.end_step()  # the pipeline is filling
    steps = engine.stats().steps
    engine.start_step()
    assert len(engine._pipeline) == 2
    assert engine.stats().steps == steps
    engine.end_step()
    assert engine.stats().steps == steps + 1
    assert len(engine._pipeline) == 1
    engine.abort("r")
    while engine.has_work:
        engine.step()
    assert not engine._masks._matchers
