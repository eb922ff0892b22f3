"""`--kv-cache-dtype int8`: the same equalities, and scores close to those over a float32 cache."""

import numpy as np
import pytest
from engine.builders import int8_runner, new_engine, tiny_model
from engine.test_equality import GREEDY, SEEDED, ids, logprobs, whole

MAX_CHANGE = 2e-3
"""Nats by which another order of sums may change a score: it can move a code to its neighbour."""
MAX_ERROR = 0.1
"""Nats between scores over int8 and over float32 keys and values; measured 0.043 and 0.034."""


def int8_engine(model_type="llama", tensor_parallel=1, **limits):
    groups = tiny_model(model_type, tensor_parallel)[1]
    return new_engine(int8_runner(model_type, tensor_parallel), groups, **limits)


@pytest.fixture
def requests(prompt):
    return [
        (prompt(length, seed), {**(GREEDY if seed % 2 else SEEDED), "ignore_eos": True})
        for seed, length in enumerate([60, 31, 17, 3, 1])
    ]


def assert_close(outputs, expected):
    assert ids(outputs) == ids(expected)
    assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=MAX_CHANGE)


MODELS = pytest.mark.parametrize(
    "model_type", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)]
)


@MODELS
def test_batched_or_alone(run, requests, model_type):
    engine = int8_engine(model_type)
    assert_close(run(engine, requests), run(engine, requests, together=False))


def test_e0_batchmates_and_depth(run, prompt):
    mine = (prompt(9, 1), {**SEEDED, "ignore_eos": True})
    first, second = (
        run(int8_engine(pipeline_depth=depth), [mine, (prompt(9, other), mine[1])])[0]
        for depth, other in ((0, 2), (1, 3))
    )
    assert whole([first]) == whole([second])


def test_preempted_or_not_and_chunked(run, requests):
    small = int8_engine(num_pages=24, max_num_batched_tokens=9)
    outputs = run(small, requests)
    assert small.stats().num_preemptions > 0, "the pool was meant to be too small"
    assert_close(outputs, run(int8_engine(), requests))


def test_tensor_parallel(run, requests):
    outputs = run(int8_engine(tensor_parallel=2), requests)
    assert_close(outputs, run(int8_engine(), requests))


@MODELS
def test_scores_stay_close_to_a_float32_cache(make_engine, run, prompt, model_type):
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
    requests = [(prompt(length, length), params) for length in (60, 33, 8)]
    coded, exact = (
        np.concatenate(
            [
                [entry.logprob for entry in output.prompt_logprobs[1:]]
                for output in run(engine, requests)
            ]
        )
        for engine in (int8_engine(model_type), make_engine(model_type))
    )
    error = np.abs(coded - exact).max()
    assert 0 < error < MAX_ERROR


def test_the_pool_is_told_in_bytes_per_token():
    cache = int8_runner().config.cache
    assert cache.dtype == np.int8
    values = 2 * cache.num_kv_heads * cache.head_dim
    scales = 2 * cache.num_kv_heads * 4
    assert cache.token_bytes == cache.num_layers * (values + scales)
