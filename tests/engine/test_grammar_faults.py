"""Completions with a grammar that something goes wrong with: others do not notice."""

import dataclasses

import numpy as np
import pytest
from engine.builders import run_requests
from engine.grammars import GRAMMARS, constrained, mixed, only, texts
from engine.test_isolation import WHERE, Faults

from jaxinfer.constraints import GrammarMatcher
from jaxinfer.grammar import Grammar
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams


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
