"""What goes wrong with one request, or with one step, and that nobody else notices."""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from engine.builders import NUM_ROWS, assert_idle, run_requests, run_schedule

from jaxinfer import admission
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.stop_strings import StopMatcher

SECRET = "my password"
_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: _events.append(event) if event.startswith("/jax/core/compile") else None
)


@pytest.fixture(params=[True, False], ids=["cached", "cold"])
def engine(request, make_engine, depth):
    """An engine at either depth that uses all six rows, with a prefix cache and without."""
    limits = {"max_num_batched_tokens": 16, "max_prefill_chunk_tokens": 16}
    engine = make_engine(
        prefix_cache=request.param, max_num_seqs=NUM_ROWS, pipeline_depth=depth, **limits
    )
    yield engine
    assert_idle(engine)
    assert not engine.scheduler.quarantine.is_active


def requests_of(prompt, count=NUM_ROWS, max_tokens=10):
    """Requests of all kinds: greedy, seeded, with penalties, stop strings, log-probabilities."""
    base = {"max_tokens": max_tokens, "ignore_eos": True}
    kinds = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"seed": 1, "repetition_penalty": 1.3, "logprobs": 0},
        {"seed": 2, "top_p": 0.9, "presence_penalty": 0.4},
        {"temperature": 0.0, "stop": ["never in there"], "prompt_logprobs": 0},
    ]
    return [(prompt(3 + 5 * i, i), {**base, **kinds[i % len(kinds)]}) for i in range(count)]


def assert_same(mine, theirs):
    """All of an output but the last digits of its log-probabilities."""
    assert [dataclasses.replace(one, logprobs=None) for one in mine.outputs] == [
        dataclasses.replace(one, logprobs=None) for one in theirs.outputs
    ]
    pairs = [(mine.prompt_logprobs, theirs.prompt_logprobs)]
    for one, other in zip(mine.outputs, theirs.outputs, strict=True):
        pairs.append((one.logprobs, other.logprobs))
    for scores, others in pairs:
        assert (scores is None) == (others is None)
        for score, other in zip(scores or (), others or (), strict=True):
            assert (score is None) == (other is None)
            if score is not None:
                assert score.token_id == other.token_id
                assert score.logprob == pytest.approx(other.logprob, abs=1e-4)


class Faults:
    """Makes steps of a runner fail.

    Attributes:
      culprits: by sequence name, the position from which on every step that computes it fails.
      accidents: numbers of steps that fail whoever is in them.
      where: "dispatch" with the device state left alone, "device" if it is gone as after a donating
        call, or "collect" when the step's results are to be read.
    """

    def __init__(self, runner, monkeypatch, where, culprits=None, accidents=()):
        self.runner, self.where = runner, where
        self.culprits, self.accidents = culprits or {}, accidents
        self.steps = self.raised = 0
        self.dispatch, self.collect = runner.dispatch, runner.collect
        self.doomed = []
        monkeypatch.setattr(runner, "dispatch", self._dispatch)
        monkeypatch.setattr(runner, "collect", self._collect)

    def _dispatch(self, plan, masks=None):
        fails = self.steps in self.accidents or any(
            row.start + row.num_tokens > self.culprits.get(row.sequence.seq_id, 10**9)
            for row in plan.rows
        )
        self.steps += 1
        if fails and self.where != "collect":
            if self.where == "device":
                for leaf in jax.tree.leaves(self.runner._state):
                    leaf.delete()
            self.raised += 1
            raise ArithmeticError(f"injected\nwith {SECRET}")
        pending = self.dispatch(plan, masks)
        if fails:
            self.doomed.append(pending)
        return pending

    def _collect(self, pending):
        if any(pending is one for one in self.doomed):
            self.raised += 1
            raise ArithmeticError(f"injected\nwith {SECRET}")
        return self.collect(pending)


WHERE = ["dispatch", "device", "collect"]


# One request.


def test_what_cannot_be_started_ends_alone(engine, run, prompt, monkeypatch, caplog):
    requests = requests_of(prompt, 3)
    expected = run(engine, requests)
    made = []

    def make(*arguments, **options):
        made.append(arguments)
        if len(made) in (2, 3):
            raise KeyError(SECRET)
        return Detokenizer(*arguments, **options)

    monkeypatch.setattr(admission, "Detokenizer", make)
    ids, params = requests[1]
    culprit = (ids, {**params, "n": 2})
    before = engine.stats().finished.get("error", 0)
    outputs = run(engine, [requests[0], culprit, culprit, requests[2]])
    for output in outputs[1:3]:
        for choice in output.outputs:
            assert (choice.finish_reason, choice.error) == ("error", "internal error (KeyError)")
            assert choice.token_ids == []
    assert_same(outputs[0], expected[0])
    assert_same(outputs[3], expected[2])
    assert engine.stats().finished["error"] == before + 4
    assert "KeyError" in caplog.text
    assert SECRET not in caplog.text


def test_a_refusal_is_no_fault(engine, prompt):
    params = SamplingParams(max_tokens=3, logit_bias={999: 1.0})
    with pytest.raises(ValueError, match="999"):
        engine.add(EngineRequest("r", tuple(prompt(3)), params))
    assert not engine.has_work


@pytest.mark.parametrize("patched", [Detokenizer, StopMatcher])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_text_that_cannot_be_made_ends_one_completion(
    engine, run, prompt, monkeypatch, caplog, patched, after
):
    # Only what may hold a stop string is looked at for one.
    options = {"n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True, "stop": ["no such text"]}
    requests = [(prompt(9, 1), options), *requests_of(prompt, 3)]
    expected = run(engine, requests)
    pushes = Counter()
    push = patched.push
    makers = []

    def faulty(self, item):
        if self not in makers:
            makers.append(self)
        pushes[id(self)] += 1
        # The second completion that gets its first token: of the request with three.
        if makers.index(self) == 1 and pushes[id(self)] > after:
            raise UnicodeError(SECRET)
        return push(self, item)

    monkeypatch.setattr(patched, "push", faulty)
    outputs = run(engine, requests)
    failed = [
        (output, other, index)
        for output, other in zip(outputs, expected, strict=True)
        for index, choice in enumerate(output.outputs)
        if choice.finish_reason == "error"
    ]
    ((output, other, index),) = failed
    assert output.outputs[index].error == "internal error (UnicodeError)"
    assert output.outputs[index].token_ids == other.outputs[index].token_ids[:after]
    output.outputs[index] = other.outputs[index]
    for one, another in zip(outputs, expected, strict=True):
        assert_same(one, another)
    assert "UnicodeError" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("takes_state", [False, True], ids=["state kept", "state lost"])
@pytest.mark.parametrize("when", ["admitted", "resumed"])
def test_a_row_that_cannot_be_set_up_ends_alone(
    engine, run, prompt, monkeypatch, takes_state, when
):
    requests = requests_of(prompt)
    expected = run(engine, requests)
    reset = engine.runner.reset
    culprit = tuple(requests[3][0])

    def faulty(row, params, stop_ids, token_ids, prompt_len, *more):
        is_culprit = tuple(token_ids[:prompt_len]) == culprit
        if is_culprit and len(token_ids) > prompt_len + 1 - 2 * (when == "admitted"):
            if takes_state:
                for leaf in jax.tree.leaves(engine.runner._state.rows):
                    leaf.delete()
            raise OSError(SECRET)
        return reset(row, params, stop_ids, token_ids, prompt_len, *more)

    monkeypatch.setattr(engine.runner, "reset", faulty)
    if when == "resumed":
        Faults(engine.runner, monkeypatch, "device", accidents={6})
    outputs = run(engine, requests)
    choice = outputs[3].outputs[0]
    assert (choice.finish_reason, choice.error) == ("error", "internal error (OSError)")
    whole = expected[3].outputs[0].token_ids
    assert choice.token_ids == whole[: len(choice.token_ids)]
    assert (len(choice.token_ids) > 1) == (when == "resumed")
    for index in (0, 1, 2, 4, 5):
        assert_same(outputs[index], expected[index])


# One step.


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("accident", [0, 1, 2, 7])
def test_a_step_that_fails_once_is_noticed_by_nobody(
    engine, run, prompt, monkeypatch, caplog, where, accident
):
    requests = requests_of(prompt)
    expected = run(engine, requests)
    engine.clear_prefix_cache()
    before = engine.stats()
    faults = Faults(engine.runner, monkeypatch, where, accidents={accident})
    old = jax.tree.leaves(engine.runner._state)
    _events.clear()
    outputs = run(engine, requests)
    for output, other in zip(outputs, expected, strict=True):
        assert_same(output, other)
    assert faults.raised == 1
    assert engine.stats().failed_steps == before.failed_steps + 1
    assert engine.stats().finished.get("error", 0) == before.finished.get("error", 0)
    assert all(leaf.is_deleted() for leaf in old)
    assert _events == [], "nothing is compiled for a rebuild"
    lines = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("ArithmeticError: injected")


@pytest.mark.parametrize("where", WHERE)
def test_an_accident_of_a_lone_request_does_not_end_it(engine, run, prompt, monkeypatch, where):
    requests = requests_of(prompt, 1)
    expected = run(engine, requests)
    Faults(engine.runner, monkeypatch, where, accidents={2, 9})
    assert_same(run(engine, requests)[0], expected[0])


@pytest.mark.parametrize("where", WHERE[1:])
@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("guilty", [(0,), (5,), (1, 4), tuple(range(NUM_ROWS))])
def test_the_culprits_among_six_rows(engine, run, prompt, monkeypatch, where, tokens, guilty):
    """From their prompts on, or from a later token on."""
    requests = requests_of(prompt)
    expected = run(engine, requests)
    before = engine.stats().failed_steps
    culprits = {f"r{i}/0": len(requests[i][0]) - 1 + tokens for i in guilty}
    Faults(engine.runner, monkeypatch, where, culprits)
    outputs = run(engine, requests)
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        if index not in guilty:
            assert_same(output, other)
            continue
        choice = output.outputs[0]
        assert (choice.finish_reason, choice.error) == ("error", "internal error (ArithmeticError)")
        assert choice.token_ids == other.outputs[0].token_ids[:tokens]
        assert choice.text == other.outputs[0].text[: len(choice.text)]
    assert engine.stats().failed_steps - before <= len(guilty) * 5


@pytest.mark.parametrize("where", WHERE)
def test_a_crowd_in_a_small_pool_with_culprits_and_aborts(
    make_engine, run, prompt, depth, monkeypatch, where
):
    """B12, B13: more requests than rows, preemption, several decode steps at once."""
    rng = np.random.default_rng(depth)
    requests = requests_of(prompt, 14, max_tokens=20)
    requests = [(ids[:30], params) for ids, params in requests]
    expected = run(make_engine(), requests)
    engine = make_engine(num_pages=30, pipeline_depth=depth, decode_steps=3)
    culprits = {f"r{i}/0": len(requests[i][0]) + int(rng.integers(18)) for i in (2, 7, 8)}
    faults = Faults(engine.runner, monkeypatch, where, culprits, accidents={20, 55})
    outputs = run_schedule(engine, requests, [0] * len(requests), {5: 25, 8: 40})
    assert faults.raised >= 5
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        choice, whole = output.outputs[0], other.outputs[0]
        if choice.finish_reason == "abort":
            assert index in (5, 8)
        elif f"r{index}/0" in culprits:
            assert choice.finish_reason == "error"
        else:
            assert_same(output, other)
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]


def test_an_abort_during_the_search_ends_it(engine, prompt, monkeypatch):
    faults = Faults(engine.runner, monkeypatch, "device", {f"r{i}/0": 0 for i in range(4)})
    for index, (ids, params) in enumerate(requests_of(prompt, 4)):
        engine.add(EngineRequest(f"r{index}", tuple(ids), SamplingParams(**params)))
    while not engine.scheduler.quarantine.is_active:
        engine.step()
    for index in range(4):
        engine.abort(f"r{index}")
    faults.culprits.clear()
    assert_same(*(run_requests(engine, requests_of(prompt, 2))[:1] * 2))


@pytest.mark.parametrize("broken", ["reset_device", "run_empty"])
def test_a_rebuild_that_fails_is_the_engines_end(engine, prompt, monkeypatch, broken):
    """There is no room for the pool any more, or the device runs nothing whatever is asked."""
    with monkeypatch.context() as patch:
        Faults(engine.runner, patch, "device", accidents={0})

        def fail(*_):
            raise MemoryError("no room for the pool")

        patch.setattr(engine.runner, broken, fail)
        engine.add(EngineRequest("r", tuple(prompt(4)), SamplingParams(max_tokens=5)))
        engine.start_step()
        if engine.scheduler.limits.pipeline_depth:
            engine.end_step()  # the step is the only one: it is collected next time
            engine.start_step()
        with pytest.raises(MemoryError):
            engine.end_step()
    engine.abort("r")
    engine.runner.reset_device()
