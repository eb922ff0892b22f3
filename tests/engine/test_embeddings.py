"""Requests that embed: the hidden state of a prompt's last token, whatever else runs."""

import dataclasses

import numpy as np
import pytest
from engine.builders import Client, assert_idle, deterministic_engine, fresh

from jaxinfer.request import EMBEDDING, EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

LENGTHS = (1, 3, 4, 5, 31, 32, 33, 60)
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def embed(engine, prompts, together=True):
    """Returns the hidden states [N, D] of prompts."""
    client = Client(engine)
    for ids in prompts:
        client.add(ids, EMBEDDING, embeds=True)
        if not together:
            client.drain()
    client.drain()
    return np.array([output.hidden for output in client.outputs.values()])


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_e1_batched_chunked_preempted_or_alone(make_engine, prompts, depth, model_type):
    alone = embed(make_engine(model_type), prompts, together=False)
    assert alone.shape == (len(prompts), 64)
    assert len(np.unique(alone, axis=0)) == len(prompts)
    np.testing.assert_allclose(
        embed(make_engine(model_type, pipeline_depth=depth), prompts), alone, atol=1e-4
    )
    chunked = make_engine(model_type, max_num_batched_tokens=5, pipeline_depth=depth)
    np.testing.assert_allclose(embed(chunked, prompts), alone, atol=1e-4)
    small = make_engine(model_type, max_num_batched_tokens=6, num_pages=26, pipeline_depth=depth)
    client = Client(small)
    for ids in prompts:
        client.add(ids, EMBEDDING, embeds=True)
        client.add(ids, {**GREEDY, "max_tokens": 24})
    client.drain()
    assert small.stats().num_preemptions > 0, "the pool was meant to be too small"
    found = [output.hidden for output in list(client.outputs.values())[::2]]
    np.testing.assert_allclose(found, alone, atol=1e-4)


def test_e1_beside_decodes_and_they_beside_it(make_engine, run, prompts, prompt, depth):
    engine = make_engine(pipeline_depth=depth)
    requests = [(prompt(9, 70 + i), {**GREEDY, "max_tokens": 20, "logprobs": 1}) for i in range(2)]
    undisturbed = run(make_engine(), requests)
    client = Client(engine)
    for ids, params in requests:
        client.add(ids, params)
    for _ in range(4):
        client.step()
    for ids in prompts:
        client.add(ids, EMBEDDING, embeds=True)
    client.drain()
    outputs = list(client.outputs.values())
    alone = embed(make_engine(), prompts, together=False)
    np.testing.assert_allclose([output.hidden for output in outputs[2:]], alone, atol=1e-4)
    for mine, expected in zip(outputs[:2], undisturbed, strict=True):
        assert mine.hidden is None
        assert mine.outputs[0].token_ids == expected.outputs[0].token_ids


def test_e1_tensor_parallel(make_engine, prompts):
    two = embed(make_engine(tensor_parallel=2), prompts)
    np.testing.assert_allclose(two, embed(make_engine(), prompts), atol=1e-4)


def test_deterministic_engines_give_the_same_bits(prompts):
    engine = deterministic_engine("bfloat16")
    alone = embed(fresh(engine), prompts, together=False)
    np.testing.assert_array_equal(embed(fresh(engine), prompts), alone)


def test_one_output_and_what_it_holds(make_engine, prompt):
    client = Client(make_engine())
    client.add(prompt(20), EMBEDDING, embeds=True)
    client.drain()
    (output,) = client.outputs.values()
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].text == ""
    assert output.outputs[0].finish_reason == "length"
    assert client.engine.stats().prompt_tokens == 20
    assert client.engine.stats().generation_tokens == 0


def test_prompts_are_computed_whole_and_found_by_others(make_engine, run, prompt):
    """Issue 6: no look-up in the prefix cache; what was computed is there for those behind."""
    engine = make_engine(prefix_cache=True)
    first, second = embed(engine, [prompt(30)]), embed(engine, [prompt(30)])
    np.testing.assert_array_equal(first, second)
    assert engine.stats().prefix_cache_queries == 0
    (output,) = run(engine, [(prompt(30), GREEDY)])
    assert output.num_cached_tokens == 28
    (cold,) = run(make_engine(), [(prompt(30), GREEDY)])
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_state_that_is_not_finite_ends_its_request_alone(make_engine, prompt, poisoned, depth):
    good = [token for token in prompt(50, 5) if token != poisoned][:40]
    engine = make_engine(prefix_cache=True, pipeline_depth=depth, max_num_batched_tokens=16)
    client = Client(engine)
    for ids in (good, [*good[:9], poisoned, *good[10:]], good):
        client.add(ids, EMBEDDING, embeds=True)
    client.drain()
    outputs = list(client.outputs.values())
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].hidden is None
    assert outputs[0].hidden == pytest.approx(outputs[2].hidden, abs=1e-4)


def test_a_failed_step_is_repeated(make_engine, prompts, monkeypatch, depth):
    engine = make_engine(pipeline_depth=depth)
    expected = embed(make_engine(), prompts)
    collect, calls = engine.runner.collect, []

    def fail_once(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("a device is lost")
        return collect(*args)

    monkeypatch.setattr(engine.runner, "collect", fail_once)
    np.testing.assert_allclose(embed(engine, prompts), expected, atol=1e-4)
    assert engine.stats().failed_steps == 1


def test_cancelled_requests_leave_nothing(make_engine, prompt, depth):
    engine = make_engine(pipeline_depth=depth, max_num_batched_tokens=8)
    client = Client(engine)
    name = client.add(prompt(60), EMBEDDING, embeds=True)
    for _ in range(3):
        client.step()
    client.abort(name)
    while engine.has_work:
        client.step()
    assert_idle(engine)
    assert client.outputs[name].hidden is None


@pytest.mark.parametrize("params", [{"max_tokens": 1}, {}, {"max_tokens": 0, "n": 2}])
def test_settings_that_would_generate_are_refused(make_engine, params):
    engine = make_engine()
    request = EngineRequest("r", (1, 2), SamplingParams(**params), embeds=True)
    with pytest.raises(InvalidParameter, match="embeds generates nothing"):
        engine.add(request)


def test_the_longest_prompt_fits_and_one_more_token_does_not(make_engine, prompt):
    engine = make_engine(num_pages=120)
    longest = EngineRequest("r", tuple(prompt(engine.max_model_len)), EMBEDDING, embeds=True)
    engine.check(longest)
    too_long = dataclasses.replace(longest, prompt_token_ids=(*longest.prompt_token_ids, 1))
    with pytest.raises(InvalidParameter, match="maximum context length"):
        engine.check(too_long)
