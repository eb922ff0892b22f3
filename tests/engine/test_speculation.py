"""Drafts change how many steps a text takes, and nothing of the text."""

import dataclasses
import random

import pytest
from engine.builders import EOS, SPECULATION, run_schedule
from engine.test_equality import GREEDY, assert_e1, ids

from jaxinfer import admission
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams
from jaxinfer.scheduler.ngram import NgramDrafter

GREEDY = {**GREEDY, "max_tokens": 20, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "seed": 7}
MODELS = pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])


class ForcedDrafter(NgramDrafter):
    """Proposes what is known to come, wrong from `num_right(rng)` tokens on."""

    def __init__(self, known, num_right, most):
        self.known, self.num_right, self.most = list(known), num_right, most
        self.position, self.rng = 0, random.Random(len(self.known))

    def extend(self, token_ids):
        assert list(token_ids) == self.known[self.position : self.position + len(token_ids)]
        self.position += len(token_ids)

    def learn(self, num_proposed, num_accepted):
        assert 0 <= num_accepted <= num_proposed

    @property
    def has_drafts(self):
        return self.position < len(self.known)

    def propose(self, most):
        drafts = self.known[self.position : self.position + min(most, self.most)]
        right = self.num_right(self.rng, len(drafts))
        return tuple(token if i < right else (token + 1) % 256 for i, token in enumerate(drafts))


RIGHT = {
    "all right": lambda rng, count: count,
    "all wrong": lambda rng, count: 0,
    "half right": lambda rng, count: count // 2,
    "some right": lambda rng, count: rng.randint(0, count),
}


@pytest.fixture
def forced(monkeypatch):
    """Makes sequences draft from outputs of an earlier run."""

    def force(outputs, num_right):
        known = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}
        monkeypatch.setattr(
            admission,
            "NgramDrafter",
            lambda most, prompt: ForcedDrafter(known[tuple(prompt)], num_right, most),
        )

    return force


@pytest.fixture
def requests(prompt):
    return [
        (prompt(length, seed), dict(GREEDY if seed % 2 else SEEDED))
        for seed, length in enumerate([1, 3, 31, 33, 60, 17])
    ]


@MODELS
@pytest.mark.parametrize("right", RIGHT)
def test_e1_forced_drafts(make_engine, run, requests, forced, depth, model_type, right):
    expected = run(make_engine(model_type), requests)
    forced(expected, RIGHT[right])
    for options in ({}, {"prefix_cache": True, "decode_steps": 3}):
        engine = make_engine(model_type, pipeline_depth=depth, **SPECULATION, **options)
        assert_e1(run(engine, requests), expected)
        stats = engine.stats()
        assert stats.num_draft_tokens > 0
        if right == "all right":
            assert stats.num_accepted_tokens == stats.num_draft_tokens
        elif right == "all wrong":
            assert stats.num_accepted_tokens == 0
        else:
            assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@MODELS
def test_e1_ngram_drafts_of_repetitions(make_engine, run, prompt, depth, model_type):
    """A tiny model soon repeats itself; drafts come and go between plain and bulk decodes."""
    requests = [
        (prompt(9, seed) * 3, {**params, "max_tokens": 70})
        for seed, params in enumerate([GREEDY, SEEDED, GREEDY, GREEDY, SEEDED])
    ]
    expected = run(make_engine(model_type), requests)
    engine = make_engine(model_type, pipeline_depth=depth, decode_steps=3, **SPECULATION)
    assert_e1(run(engine, requests), expected)
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_right_drafts_save_steps(make_engine, run, prompt, forced):
    requests = [(prompt(9), {**GREEDY, "max_tokens": 25})]
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["all right"])
    engine = make_engine(**SPECULATION)
    run(engine, requests)
    # The first token comes of the prompt, then each step brings seven drafts and one more.
    assert engine.stats().steps == 1 + 24 / 8
    assert engine.stats().num_drafts == 3


@pytest.mark.parametrize("right", ["all right", "some right"])
def test_the_end_inside_drafts(make_engine, run, prompt, forced, depth, right):
    """By a stop id, by a stop string, by min_tokens past it, and by max_tokens."""
    mine = prompt(9, 3)
    [plain] = run(make_engine(), [(mine, SEEDED)])
    forced([plain], RIGHT[right])
    tokens, text = plain.outputs[0].token_ids, plain.outputs[0].text
    endings = [{"stop_token_ids": [tokens[index]]} for index in (1, 4, 8, 12)]
    endings += [{"stop": text[start : start + 2]} for start in (1, 4, 9)]
    endings += [{"stop_token_ids": [tokens[2]], "min_tokens": 3}]
    endings += [{"max_tokens": count} for count in range(1, 11)]
    for ending in endings:
        params = {**SEEDED, **ending}
        expected = run(make_engine(), [(mine, params)])
        if "min_tokens" in ending:  # the ban on stop ids leads elsewhere
            forced(expected, RIGHT[right])
        engine = make_engine(pipeline_depth=depth, **SPECULATION)
        outputs = run(engine, [(mine, params)])
        assert_e1(outputs, expected)
        [choice], [other] = outputs[0].outputs, expected[0].outputs
        assert choice.text == other.text
        assert (choice.finish_reason, choice.stop_reason) == (
            other.finish_reason,
            other.stop_reason,
        )
        if "stop_token_ids" in ending and "min_tokens" not in ending:
            assert choice.finish_reason == "stop"
        forced([plain], RIGHT[right])


def test_the_end_of_the_context_inside_drafts(make_engine, run, prompt, forced, depth):
    requests = [(prompt(250), {**GREEDY, "max_tokens": None})]
    expected = run(make_engine(), requests)
    assert len(expected[0].outputs[0].token_ids) == 6
    forced(expected, RIGHT["all right"])
    assert_e1(run(make_engine(pipeline_depth=depth, **SPECULATION), requests), expected)


def test_an_end_of_sequence_inside_drafts_kills_the_row(make_engine, run, prompt, forced, depth):
    params = {**SEEDED, "ignore_eos": False, "logit_bias": {EOS: 2.0}}
    requests = [(prompt(9, seed), params) for seed in range(8)]
    expected = run(make_engine(), requests)
    lengths = [len(output.outputs[0].token_ids) for output in expected]
    assert any(2 < length < 20 for length in lengths), lengths
    forced(expected, RIGHT["all right"])
    outputs = run(make_engine(pipeline_depth=depth, **SPECULATION), requests)
    assert_e1(outputs, expected)
    assert [one.outputs[0].finish_reason for one in outputs] == [
        one.outputs[0].finish_reason for one in expected
    ]


def test_e1_preempted_or_not(make_engine, run, requests, forced, depth):
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["some right"])
    engine = make_engine(num_pages=24, pipeline_depth=depth, **SPECULATION)
    assert_e1(run(engine, requests), expected)
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    assert engine.stats().num_accepted_tokens > 0


def test_batchmates_without_drafts(make_engine, run, requests, forced, depth):
    mixed = [
        (ids_, {**params, "speculation": [None, False, True][index % 3]})
        for index, (ids_, params) in enumerate(requests)
    ]
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["some right"])
    engine = make_engine(pipeline_depth=depth, **SPECULATION)
    assert_e1(run(engine, mixed), expected)
    assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"speculation": False},
    ],
    ids=lambda params: next(iter(params)),
)
def test_not_drafted(make_engine, run, prompt, forced, params):
    requests = [(prompt(9), {**SEEDED, **params})]
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["all right"])
    engine = make_engine(**SPECULATION)
    assert [dataclasses.asdict(one) for one in run(engine, requests)] == [
        dataclasses.asdict(one) for one in expected
    ]
    assert engine.stats().num_draft_tokens == 0


def test_asked_for_where_it_is_off(make_engine, prompt):
    engine = make_engine()
    request = EngineRequest("r", tuple(prompt(3)), SamplingParams(speculation=True))
    with pytest.raises(InvalidParameter, match="--speculation ngram") as error:
        engine.add(request)
    assert (error.value.param, error.value.code) == ("speculation", "unsupported_parameter")


def test_prompt_scores_beside_drafts(make_engine, run, requests, forced):
    asking = [(ids_, {**params, "prompt_logprobs": 2}) for ids_, params in requests]
    expected = run(make_engine(), asking)
    forced(expected, RIGHT["half right"])
    outputs = run(make_engine(**SPECULATION), asking)
    assert_e1(outputs, expected)
    for output, other in zip(outputs, expected, strict=True):
        scores, others = output.prompt_logprobs[1:], other.prompt_logprobs[1:]
        assert [score.token_id for score in scores] == [score.token_id for score in others]
        values = [score.logprob for score in others]
        assert [score.logprob for score in scores] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("when", range(1, 8))
def test_aborted_while_drafts_are_verified(make_engine, run, requests, forced, depth, when):
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["some right"])
    engine = make_engine(pipeline_depth=depth, **SPECULATION)
    outputs = run_schedule(engine, requests[:4], [0] * 4, {1: when})
    for index in (0, 2, 3):
        assert outputs[index].outputs[0].token_ids == ids(expected)[index]
    assert outputs[1].outputs[0].finish_reason == "abort"


def test_a_step_with_drafts_that_fails_is_run_again(
    make_engine, run, requests, forced, depth, monkeypatch
):
    expected = run(make_engine(), requests)
    forced(expected, RIGHT["some right"])
    engine = make_engine(pipeline_depth=depth, **SPECULATION)
    dispatch, failed = engine.runner.dispatch, []

    def fails_once(plan, masks):
        if not failed and any(row.num_drafts for row in plan.rows):
            failed.append(plan)
            raise RuntimeError("the device failed")
        return dispatch(plan, masks)

    monkeypatch.setattr(engine.runner, "dispatch", fails_once)
    assert_e1(run(engine, requests), expected)
    assert failed
    assert engine.stats().failed_steps == 1
