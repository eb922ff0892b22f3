"""B11, B12: a warm prefix changes nothing but the work, and a hit is proved by its counter."""

import pytest
from engine.builders import PAGE_SIZE, SPECULATION, run_requests
from engine.test_equality import GREEDY, SEEDED, assert_e1
from engine.test_int8_kv import assert_close, int8_engine
from engine.test_lifecycle import drain

from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams

MODELS = pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
LENGTHS = (1, 3, 4, 5, 31, 32, 33, 60)


def cached_length(length):
    """Tokens of a prompt that is in the cache whole: full pages, and never its last token."""
    return (length - 1) // PAGE_SIZE * PAGE_SIZE


@pytest.fixture
def requests(prompt):
    return [
        (prompt(length, seed), {**(GREEDY if seed % 2 else SEEDED), "ignore_eos": True})
        for seed, length in enumerate(LENGTHS)
    ]


@MODELS
def test_e1_warm_or_cold(make_engine, run, requests, prompt, depth, model_type):
    """Cold, twice warm, with other tails, after eviction, and all together."""
    engine = make_engine(model_type, prefix_cache=True, pipeline_depth=depth, decode_steps=3)
    cold = run(make_engine(model_type), requests, together=False)
    tails = [(ids + prompt(9, 50), params) for ids, params in requests]
    cold_tails = run(make_engine(model_type), tails, together=False)
    assert_e1(run(engine, requests, together=False), cold)
    for together in (False, True):
        warm = run(engine, requests, together)
        assert_e1(warm, cold)
        assert [output.num_cached_tokens for output in warm] == list(map(cached_length, LENGTHS))
    warm = run(engine, tails, together=False)
    assert_e1(warm, cold_tails)
    full = [length // PAGE_SIZE * PAGE_SIZE for length in LENGTHS]
    assert [output.num_cached_tokens for output in warm] == full
    run(engine, [(prompt(100, 60 + i), {**GREEDY, "max_tokens": 1}) for i in range(6)], False)
    evicted = run(engine, requests, together=False)
    assert_e1(evicted, cold)
    assert [output.num_cached_tokens for output in evicted] != list(map(cached_length, LENGTHS))


@MODELS
def test_e1_a_crowd_that_shares_a_prefix(make_engine, run, prompt, depth, model_type):
    """All at once, in a pool so small that pages are evicted and sequences preempted."""
    shared = prompt(22, 99)
    requests = [
        (shared[: 22 - index % 3] + prompt(6, index % 9), {**SEEDED, "ignore_eos": True})
        for index in range(24)
    ]
    cold = run(make_engine(model_type), requests, together=False)
    engine = make_engine(
        model_type, prefix_cache=True, num_pages=20, pipeline_depth=depth, decode_steps=3
    )
    assert_e1(run(engine, requests), cold)
    stats = engine.stats()
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert stats.prefix_cache_queries == sum(len(ids) for ids, _ in requests)
    assert stats.prefix_cache_hits > 10 * len(requests)


def test_siblings_share_the_prompt(make_engine, run, prompt, depth):
    params = {**SEEDED, "n": 3, "ignore_eos": True}
    (cold,) = run(make_engine(), [(prompt(21), params)])
    engine = make_engine(prefix_cache=True, pipeline_depth=depth)
    (output,) = run(engine, [(prompt(21), params)])
    assert_e1([output], [cold])
    stats = engine.stats()
    assert stats.prefix_cache_hits == 2 * 20
    assert stats.prompt_tokens == 3 * 21, "those found in the cache count, too"
    assert stats.prompt_tokens - stats.prefix_cache_hits == 21 + 2
    assert output.num_cached_tokens == 0, "the request itself found nothing"


def test_scored_prompts_are_computed_and_found(make_engine, run, prompt):
    params = {"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 2, "ignore_eos": True}
    engine = make_engine(prefix_cache=True)
    first, second = (run(engine, [(prompt(30), params)])[0] for _ in range(2))
    assert len(second.prompt_logprobs) == 30
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.num_cached_tokens == 0
    (third,) = run(engine, [(prompt(30), {**params, "prompt_logprobs": None})])
    assert third.num_cached_tokens == 28
    assert third.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_cancelled_request_leaves_what_it_computed(make_engine, prompt, run, depth):
    engine = make_engine(prefix_cache=True, pipeline_depth=depth, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    engine.add(EngineRequest("gone", tuple(prompt(60)), params))
    for _ in range(2):
        engine.step()
    engine.abort("gone")
    assert drain(engine) == []
    (output,) = run(engine, [(prompt(60), params)])
    # Two chunks of 16 were dispatched; with depth 1 the results of one were read.
    assert output.num_cached_tokens == (32 if depth == 0 else 16)
    assert_e1([output], run(make_engine(), [(prompt(60), params)]))


def test_a_row_that_is_not_finite_leaves_no_page(make_engine, run, prompt, depth, poisoned):
    """Also where it was computed in a chunk without logits, which tell no numbers from others."""
    clean = [token for token in prompt(50, 5) if token != poisoned][:40]
    bad = [*clean[:9], poisoned, *clean[10:]]
    params = {**GREEDY, "ignore_eos": True, "logit_bias": {poisoned: -100.0}}
    cold = run(make_engine(), [(clean, params)])
    engine = make_engine(prefix_cache=True, pipeline_depth=depth, max_num_batched_tokens=16)
    for num_shared in (0, 8):
        (output,) = run(engine, [(bad, params)])
        assert output.outputs[0].finish_reason == "error"
        assert output.num_cached_tokens == num_shared
        warm = run(engine, [(clean, params)])
        assert_e1(warm, cold)
        assert warm[0].num_cached_tokens == 0
    assert run(engine, [(clean, params)])[0].num_cached_tokens == 36


def test_salts_keep_requests_apart(make_engine, prompt):
    engine = make_engine(prefix_cache=True)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    found = []
    for salt in ("a", "a", "b", None, None, "b"):
        engine.add(EngineRequest("r", tuple(prompt(20)), params, cache_salt=salt))
        found += [delta.num_cached_tokens for delta in drain(engine)]
    assert found == [0, 16, 0, 0, 16, 16]


def test_clearing_forgets(make_engine, run, prompt):
    engine = make_engine(prefix_cache=True)
    request = [(prompt(20), {**GREEDY, "max_tokens": 1})]
    assert [run(engine, request)[0].num_cached_tokens for _ in range(2)] == [0, 16]
    engine.clear_prefix_cache()
    assert [run(engine, request)[0].num_cached_tokens for _ in range(2)] == [0, 16]


def test_penalties_count_what_was_not_computed_again(make_engine, run, prompt):
    """Penalties see the whole prompt, and a resumed sequence's output, whatever was cached."""
    params = {"temperature": 0.0, "repetition_penalty": 5.0, "presence_penalty": 2.0}
    request = [(prompt(33, 4), {**params, "max_tokens": 20, "logprobs": 2, "ignore_eos": True})]
    cold = run(make_engine(), request)
    engine = make_engine(prefix_cache=True)
    for _ in range(2):
        warm = run(engine, request)
        assert_e1(warm, cold)
    assert warm[0].num_cached_tokens == 32


@MODELS
def test_drafts_that_were_wrong_are_in_no_page(make_engine, run, prompt, depth, model_type):
    """The next turn finds pages whose tokens were drafted and verified."""
    params = {**GREEDY, "max_tokens": 40, "ignore_eos": True}
    first = [(prompt(4, seed) * 6, params) for seed in range(4)]
    cold_first = run(make_engine(model_type), first)
    second = [
        (output.prompt_token_ids + output.outputs[0].token_ids + prompt(3, 9), params)
        for output in cold_first
    ]
    cold_second = run(make_engine(model_type), second)
    engine = make_engine(model_type, prefix_cache=True, pipeline_depth=depth, **SPECULATION)
    assert_e1(run(engine, first), cold_first)
    outputs = run(engine, second)
    assert_e1(outputs, cold_second)
    # All but the last token of the turn before were computed.
    expected = [cached_length(len(ids) - 3) for ids, _ in second]
    assert [output.num_cached_tokens for output in outputs] == expected
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_int8_pages_are_found(run, prompt):
    requests = [
        (prompt(length, seed), {**(GREEDY if seed % 2 else SEEDED), "ignore_eos": True})
        for seed, length in enumerate([60, 31, 17, 3, 1])
    ]
    engine = int8_engine(prefix_cache=True)
    cold = run(int8_engine(), requests)
    assert_close(run(engine, requests), cold)
    warm = run(engine, requests)
    assert_close(warm, cold)
    assert [output.num_cached_tokens for output in warm] == [56, 28, 16, 0, 0]


def test_an_engine_without_a_cache_says_so(make_engine, prompt):
    engine = make_engine()
    for _ in range(2):
        run_requests(engine, [(prompt(20), {"max_tokens": 1})])
    engine.clear_prefix_cache()
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)
