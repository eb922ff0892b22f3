"""Completions that must match a grammar: they do, whatever else runs, and others do not notice."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from engine.builders import EOS, NUM_ROWS, SPECULATION, run_requests, run_schedule
from engine.test_isolation import WHERE, Faults

from jaxinfer.constraints import GrammarMatcher
from jaxinfer.grammar import Grammar
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

MODELS = pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
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
_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: _events.append(event) if event.startswith("/jax/core/compile") else None
)


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


def only(engine, prompt_ids, params):
    [output] = run_requests(engine, [(prompt_ids, params)])
    return output.outputs[0]


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


# What goes wrong.


@pytest.mark.parametrize("method", ["fill", "advance"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_matcher_that_fails_ends_its_completion(
    make_engine, prompt, depth, monkeypatch, method, after
):
    engine = make_engine(pipeline_depth=depth)
    requests = mixed(prompt, 6)
    expected = texts(run_requests(engine, requests))
    original, calls = getattr(GrammarMatcher, method), {}

    def fail(self, argument):
        calls[self] = calls.get(self, -1) + 1
        if self is next(iter(calls)) and calls[self] == after:
            raise ValueError("my password")
        return original(self, argument)

    monkeypatch.setattr(GrammarMatcher, method, fail)
    outputs = run_requests(engine, requests)
    failed = [one for output in outputs for one in output.outputs if one.finish_reason == "error"]
    [choice] = failed
    assert choice.error == "internal error (ValueError)"
    assert len(choice.token_ids) <= after
    [(where, index)] = [
        (number, one.index)
        for number, output in enumerate(outputs)
        for one in output.outputs
        if one is choice
    ]
    assert expected[where][index][0].startswith(choice.text)
    for number, output in enumerate(outputs):
        for one, wanted in zip(texts([output])[0], expected[number], strict=True):
            assert one == wanted or one[2] == "error"


def test_a_dead_end_says_so(make_engine, prompt, depth, monkeypatch):
    """A mask without a token is the end of that completion: nothing is written without one."""
    engine = make_engine(pipeline_depth=depth)
    original = GrammarMatcher.fill

    def no_more(self, mask):
        if self._num_tokens == 2:
            self._matcher = Dead()
        original(self, mask)

    monkeypatch.setattr(GrammarMatcher, "fill", no_more)
    choice = only(engine, prompt(4), constrained("json_schema", None))
    assert (choice.finish_reason, choice.text) == ("error", '{"')
    assert choice.error == "by the grammar none of the model's tokens may come next"


class Dead:
    """A matcher of llguidance whose masks are empty."""

    def unsafe_compute_mask_ptr(self, address, size):
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(address)).fill(0)

    def is_error(self):
        return False


@pytest.mark.parametrize("where", WHERE)
def test_steps_that_fail_run_again(make_engine, prompt, depth, monkeypatch, where):
    engine = make_engine(pipeline_depth=depth, prefix_cache=True)
    requests = mixed(prompt, 8)
    expected = texts(run_requests(engine, requests))
    engine.clear_prefix_cache()
    faults = Faults(engine.runner, monkeypatch, where, accidents=(2, 9, 10, 30))
    assert texts(run_requests(engine, requests)) == expected
    assert faults.raised == 4


@pytest.mark.parametrize("where", WHERE)
def test_one_that_makes_steps_fail_ends_alone(make_engine, prompt, depth, monkeypatch, where):
    engine = make_engine(pipeline_depth=depth)
    requests = [(prompt(5 + i, i), constrained(name, i)) for i, name in enumerate(GRAMMARS)]
    expected = texts(run_requests(engine, requests))
    Faults(engine.runner, monkeypatch, where, culprits={"r1/0": 8})
    outputs = run_requests(engine, requests)
    assert outputs[1].outputs[0].finish_reason == "error"
    for index in (0, 2, 3, 4):
        assert texts(outputs)[index] == expected[index]


def test_what_does_not_compile_is_refused(make_engine, prompt):
    engine = make_engine()
    params = SamplingParams(grammar=Grammar("regex", "(", param="guided_regex"))
    request = EngineRequest("r", tuple(prompt(3)), params)
    for refuse in (engine.check, engine.add):
        with pytest.raises(InvalidParameter, match="unclosed group") as error:
            refuse(request)
        assert error.value.param == "guided_regex"
    assert not engine.has_work


def test_what_was_checked_is_not_compiled_again(make_engine, prompt, monkeypatch):
    engine = make_engine()
    params = SamplingParams(max_tokens=9, grammar=Grammar("choice", ("checked",)))
    request = EngineRequest("r", tuple(prompt(3)), params)
    engine.check(request)
    monkeypatch.setattr(engine._admission, "_grammars", None)
    engine.add(dataclasses.replace(request, priority=1))
    text = ""
    while engine.has_work:
        text += "".join(delta.text for delta in engine.step())
    assert text == "checked"


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
