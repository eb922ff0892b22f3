"""Requests that end early, fail, wait or are preempted, and what they leave behind."""

import dataclasses

import numpy as np
import pytest
from engine.builders import (
    assemble,
    assert_idle,
    run_requests,
    run_schedule,
    tiny_model,
)
from tiny_engine import VOCAB_SIZE

from jaxinfer.request import EngineRequest, QueueFullError
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

ASCII = {"logit_bias": dict.fromkeys(range(32, 127), 60.0), "ignore_eos": True}
"""Settings whose text is printable, so that stop strings can be picked out of it."""


def drain(engine):
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("when", [0, 1, 2, 3, 7])
def test_abort_frees_everything_siblings_too(make_engine, prompt, depth, when):
    engine = make_engine(pipeline_depth=depth, decode_steps=5)
    params = SamplingParams(n=3, max_tokens=50, ignore_eos=True, seed=1, prompt_logprobs=1)
    engine.add(EngineRequest("gone", tuple(prompt(40)), params))
    for _ in range(when):
        engine.step()
    deltas = engine.abort("gone")
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [
        (0, "abort"),
        (1, "abort"),
        (2, "abort"),
    ]
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_pages == engine.stats().num_pages
    assert not engine.is_open("gone")
    assert drain(engine) == [], "tokens in flight are dropped"
    assert_idle(engine)
    assert engine.stats().finished == {"abort": 3}
    assert engine.abort("gone") == []


def test_abort_of_a_request_with_one_sibling_left(make_engine, prompt):
    engine = make_engine()
    params = SamplingParams(n=4, max_tokens=40, seed=3, stop=("\x01", "\x02", "a", "b", "c"))
    engine.add(EngineRequest("r", tuple(prompt(5)), params))
    while engine.num_open("r") == 4:
        engine.step()
    left = engine.num_open("r")
    assert len(engine.abort("r")) == left
    assert drain(engine) == []
    assert_idle(engine)


def test_an_aborted_id_can_be_used_again_at_once(make_engine, run, prompt, depth):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = run(make_engine(), [(prompt(6, 2), params)])[0].outputs[0].token_ids
    engine = make_engine(pipeline_depth=depth)
    engine.add(EngineRequest("r", tuple(prompt(6, 1)), params))
    for _ in range(3):
        engine.step()
    engine.abort("r")
    engine.add(EngineRequest("r", tuple(prompt(6, 2)), params))
    ids = [token for delta in drain(engine) for token in delta.token_ids]
    assert ids == expected


def test_an_id_in_flight_is_refused(make_engine, prompt):
    engine = make_engine()
    request = EngineRequest("r", tuple(prompt(3)), SamplingParams(max_tokens=2))
    engine.add(request)
    with pytest.raises(ValueError, match="request id 'r' is already in flight"):
        engine.add(request)
    drain(engine)
    engine.add(request)
    drain(engine)
    assert_idle(engine)


def test_a_full_queue_refuses_the_excess_and_nothing_else(make_engine, prompt):
    engine = make_engine(max_queued_requests=3)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for index in range(3):
        engine.add(EngineRequest(f"r{index}", tuple(prompt(3)), params))
    with pytest.raises(QueueFullError, match="3 requests are waiting; the limit is 3"):
        engine.add(EngineRequest("excess", tuple(prompt(3)), params))
    with pytest.raises(QueueFullError):
        engine.add(EngineRequest("siblings", tuple(prompt(3)), dataclasses.replace(params, n=2)))
    engine.step()
    assert not engine.is_open("excess")
    assert not engine.is_open("siblings")
    engine.add(EngineRequest("next", tuple(prompt(3)), params))
    finished = {delta.request_id for delta in drain(engine) if delta.finish_reason == "length"}
    assert finished == {"r0", "r1", "r2", "next"}
    assert_idle(engine)


# NaN.


NEIGHBOURS = [
    {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 3},
    {
        "seed": 4,
        "max_tokens": 20,
        "top_p": 0.9,
        "top_k": 30,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "logprobs": 3,
        "logit_bias": {200: -100.0},
    },
]


@pytest.mark.parametrize("neighbour", NEIGHBOURS, ids=["greedy", "seeded"])
@pytest.mark.parametrize("where", ["prompt", "output"])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_row_that_is_not_finite_ends_alone(
    make_engine, run, prompt, depth, poisoned, neighbour, where, steps
):
    # One decode rung, so that the neighbour must be bit-equal.
    engine = make_engine(max_num_seqs=2, pipeline_depth=depth, decode_steps=steps)
    clean = [token for token in prompt(30, 5) if token != poisoned][:21]
    mine = ([token for token in prompt(12, 6) if token != poisoned], neighbour)
    calm = {"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, "prompt_logprobs": 1}
    calm["logit_bias"] = {poisoned: -100.0}
    expected = run(engine, [(clean, calm), mine])
    assert expected[0].outputs[0].finish_reason == "length"
    if where == "prompt":
        culprit = ([*clean[:9], poisoned, *clean[10:]], calm)
    else:
        culprit = (clean, {**calm, "logit_bias": {poisoned: 100.0}})
    outputs = run(engine, [culprit, mine])
    choice = outputs[0].outputs[0]
    assert choice.finish_reason == "error"
    assert choice.error == "the model's output is not finite"
    assert choice.token_ids == ([] if where == "prompt" else [poisoned])
    assert dataclasses.asdict(outputs[1]) == dataclasses.asdict(expected[1])
    # The pages it left hold NaN; the next ones to get them do not notice.
    for _ in range(3):
        again = run(engine, [(clean, calm), mine])
        for one, other in zip(again, expected, strict=True):
            assert dataclasses.asdict(one) == dataclasses.asdict(other)
    assert engine.stats().finished == {"error": 1, "length": 9}


# Preemption.


@pytest.mark.parametrize("steps", [1, 5])
def test_preemption_changes_nothing_a_client_sees(make_engine, run, prompt, depth, steps):
    """Seeds, penalties, log-probabilities and stop strings live through a recompute."""
    base = {"max_tokens": 48, "logprobs": 2, "prompt_logprobs": 1, **ASCII}
    seeded = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    requests = [
        (prompt(20, i), {**base, **seeded, "seed": i} if i % 2 else {**base, "temperature": 0.0})
        for i in range(6)
    ]
    large = make_engine()
    texts = [output.outputs[0].text for output in run(large, requests)]
    # Stop strings that straddle any moment of preemption; one request has none.
    for index, (start, width) in enumerate([(30, 2), (40, 3), (20, 4), (44, 2), (36, 5)]):
        stop = texts[index][start : start + width]
        requests[index] = (requests[index][0], {**requests[index][1], "stop": [stop]})
    expected = run(large, requests)
    assert large.stats().num_preemptions == 0
    small = make_engine(num_pages=30, pipeline_depth=depth, decode_steps=steps)
    outputs = run(small, requests)
    assert small.stats().num_preemptions >= 3, "the pool was meant to be too small"
    for output, other in zip(outputs, expected, strict=True):
        mine, theirs = output.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason, mine.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        for scores, others in [
            (mine.logprobs, theirs.logprobs),
            (output.prompt_logprobs[1:], other.prompt_logprobs[1:]),
        ]:
            assert [entry.token_id for entry in scores] == [entry.token_id for entry in others]
            assert [entry.logprob for entry in scores] == pytest.approx(
                [entry.logprob for entry in others], abs=1e-4
            )
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert small.stats().generation_tokens == generated


@pytest.mark.parametrize("length", range(1, 12))
def test_a_recompute_that_leaves_one_token_for_a_decode(make_engine, run, prompt, depth, length):
    """Chunks of a resumed sequence end anywhere, also just before its last token."""
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, "logprobs": 0}
    requests = [(prompt(length + 3 * i, i), params) for i in range(3)]
    expected = run(make_engine(), requests)
    engine = make_engine(max_num_batched_tokens=5, num_pages=12, pipeline_depth=depth)
    outputs = run(engine, requests)
    assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
    for output, other in zip(outputs, expected, strict=True):
        mine, theirs = output.outputs[0], other.outputs[0]
        assert mine.token_ids == theirs.token_ids
        assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
            [entry.logprob for entry in theirs.logprobs], abs=1e-4
        )


# Leaks.


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_nothing_leaks_between_requests(make_engine, run, prompt, depth, model_type, prefix_cache):
    """B12: a crowd with a shared prefix, a small pool and cancellations; each answers as alone."""
    rng = np.random.default_rng(depth)
    shared = prompt(20, 99)
    prompts = [shared + prompt(6, index % 9) for index in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    requests = [(one, params) for one in prompts]
    alone = [
        output.outputs[0].token_ids for output in run(make_engine(model_type), requests[:9], False)
    ]
    assert len({tuple(ids) for ids in alone}) > 5, "the prompts are meant to be told apart"
    limits = {"num_pages": 24, "pipeline_depth": depth, "decode_steps": 3}
    engine = make_engine(model_type, prefix_cache=prefix_cache, **limits)
    doomed = rng.permutation(40)[:12].tolist()
    departures = dict(zip(doomed, rng.integers(1, 150, 12).tolist(), strict=True))
    outputs = run_schedule(engine, requests, [0] * 40, departures)
    stats = engine.stats()
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert (stats.prefix_cache_hits > 0) == prefix_cache
    assert 0 < stats.finished["abort"] <= 12
    for index, output in enumerate(outputs):
        (choice,) = output.outputs
        whole = alone[index % 9]
        assert choice.finish_reason in ("length", "abort")
        num_tokens = 14 if choice.finish_reason == "length" else len(choice.token_ids)
        assert choice.token_ids == whole[:num_tokens]
    engine.clear_prefix_cache()
    assert all(pool.num_idle == 0 for pool in engine.scheduler.tables.pools)


def test_ids_without_a_token_are_neither_sampled_nor_accepted():
    """Models pad their embeddings: here 62 rows have no token, a fifth of the probability."""
    model, groups = tiny_model(vocab_size=320)
    engine = assemble(model, groups, exact=True, max_num_seqs=2, max_num_batched_tokens=8)
    assert engine.vocab_size == VOCAB_SIZE
    params = {"temperature": 2.0, "max_tokens": 120, "ignore_eos": True}
    outputs = run_requests(engine, [([5], {**params, "seed": seed}) for seed in (1, 2)])
    ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    assert len(ids) == 240
    assert max(ids) < VOCAB_SIZE
    for prompt, bias in (((VOCAB_SIZE,), {}), ((5,), {VOCAB_SIZE: 1.0})):
        with pytest.raises(InvalidParameter, match=f"{VOCAB_SIZE}"):
            engine.check(EngineRequest("r", prompt, SamplingParams(logit_bias=bias)))
