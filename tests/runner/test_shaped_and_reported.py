"""The sampler against float64 numpy: shaped logits, extremes, frequencies, reported numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner.draws import draw, ints, normal, run_report
from token_sampler_reference import make_masks, shaped

# Penalties, bias, bans.


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "repetition_penalty": st.sampled_from([1e-3, 0.5, 1.2, 1e3]),
                "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
                "frequency_penalty": st.sampled_from([-2.0, 0.25, 2.0]),
                "min_tokens": st.integers(0, 12),
                "logit_bias": st.dictionaries(
                    st.integers(0, 18), st.floats(-100, 100, width=32), max_size=19
                ),
            },
        ),
        min_size=3,
        max_size=3,
    ),
)
def test_bias_penalties_and_bans_in_their_order(make_state, seed, rows):
    rng = np.random.default_rng(seed)
    logits = normal((3, 19), seed)
    prompt_len, stop_ids = 4, frozenset({0, 7, 18})
    tokens = rng.integers(0, 19, (3, 14)).tolist()
    greedy = [{**params, "temperature": 0.0} for params in rows]
    state = make_state(greedy, 19, tokens, prompt_len, stop_ids)
    found = draw(logits, state, [14] * 3).token
    for row, params in enumerate(rows):
        prompt, output = tokens[row][:prompt_len], tokens[row][prompt_len:]
        asks = {
            "bias": params.get("logit_bias", {}),
            "repetition": params.get("repetition_penalty", 1.0),
            "presence": params.get("presence_penalty", 0.0),
            "frequency": params.get("frequency_penalty", 0.0),
            "prompt": prompt,
            "output": output,
            "min_length": prompt_len + params.get("min_tokens", 0),
            "stop_ids": stop_ids,
        }
        # What is within rounding of the best may be chosen.
        expected = shaped(logits[row], asks, 14)
        rounding = 2e-5 * np.abs(expected.max()) + 2e-4
        assert expected[found[row]] >= expected.max() - rounding


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("max_tokens", [None, 2**40])
def test_stop_ids_wait_for_min_tokens(make_state, temperature, max_tokens):
    logits = np.zeros((1, 30), np.float32)
    logits[0, [3, 9]] = 40.0
    for min_tokens in (1, 5, 2**31 - 1):
        params = {"temperature": temperature, "min_tokens": min_tokens, "max_tokens": max_tokens}
        state = make_state([params], 30, [[1] * 7], 7, frozenset({3, 9}))
        for length in range(7, 20):
            token = draw(logits, state, [length]).token[0]
            assert (token in (3, 9)) == (length - 7 >= min_tokens)


def test_a_stop_id_outside_the_vocabulary_bans_nothing(make_state):
    state = make_state([{"min_tokens": 5, "temperature": 0.0}], 30, None, 0, frozenset({30, 500}))
    assert draw(np.eye(30)[29:], state).token[0] == 29


# Masks.


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_only_what_a_mask_allows_is_drawn(make_state, temperature):
    """Also where every row wants its best token, and the best ones are banned."""
    vocab_size, allowed = 70, [{5}, {9, 40, 69}, {0, 1}, None]
    state = make_state([{"temperature": temperature, "seed": row} for row in range(4)], vocab_size)
    logits = normal((4, vocab_size), 2, scale=1.0)
    logits[:, 30] = 40.0
    masks = make_masks(allowed, range(4), vocab_size)
    for length in range(50):
        sampled = draw(logits, state, [length] * 4, masks=masks)
        for token, ids in zip(sampled.token.tolist(), allowed, strict=True):
            assert token in ids if ids is not None else token == 30
        raw = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
        expected = np.take_along_axis(raw, sampled.token[:, None], 1)[:, 0]
        np.testing.assert_allclose(sampled.logprob, expected, atol=1e-3)


# Extremes.


@pytest.mark.parametrize("temperature", [1.01e-5, 1e-3, 1.0, 2.0])
@pytest.mark.parametrize("extra", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_extreme_logits_never_make_nan(make_state, temperature, extra):
    lowest = np.finfo(np.float32).min
    logits = normal((5, 40), 5)
    logits[1, 1:] = lowest  # all but one masked
    logits[2, :] = lowest  # all masked
    logits[3, ::2] = -1e30
    logits[4, 7] = 3e38
    params = {
        "temperature": temperature,
        "logit_bias": dict.fromkeys(range(0, 40, 3), -100.0),
        "repetition_penalty": 1e3,
        "frequency_penalty": 2.0,
        **extra,
    }
    state = make_state([{**params, "seed": row} for row in range(5)], 40, [list(range(30))] * 5, 9)
    sampled = draw(logits, state, [30] * 5, wants_top=True)
    assert np.all((sampled.token >= 0) & (sampled.token < 40))
    assert sampled.token[1] == 0
    assert sampled.token[4] == 7
    assert sampled.finite.all()
    assert not np.isnan(sampled.logprob).any()
    assert not np.isnan(sampled.top_logprobs).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_that_is_not_finite_says_so_and_stays_alone(make_state, bad, params):
    logits = normal((3, 300), 3)
    state = make_state([{**params, "seed": row} for row in range(3)], 300)
    clean = draw(logits, state, wants_top=True)
    for where in ([17], range(300)):
        broken = logits.copy()
        broken[1, list(where)] = bad
        sampled = draw(broken, state, wants_top=True)
        assert sampled.finite.tolist() == [True, False, True]
        assert 0 <= sampled.token[1] < 300
        for row in (0, 2):
            jax.tree.map(
                lambda mine, theirs, row=row: np.testing.assert_array_equal(mine[row], theirs[row]),
                sampled,
                clean,
            )


# Frequencies.


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.08, 0.02]),
        ({"temperature": 2.0}, np.sqrt([0.4, 0.3, 0.2, 0.08, 0.02])),
        ({"top_k": 3}, [0.4, 0.3, 0.2, 0, 0]),
        ({"top_p": 0.65}, [0.4, 0.3, 0, 0, 0]),
        ({"min_p": 0.15}, [0.4, 0.3, 0.2, 0.08, 0]),
        ({"logit_bias": {4: math.log(10)}}, [0.4, 0.3, 0.2, 0.08, 0.2]),
    ],
    ids=str,
)
def test_draws_have_the_right_frequencies(make_state, chi_square_bound, params, expected):
    num_draws = 20_000
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.08, 0.02], np.float32))
    state = make_state([{**params, "seed": 11}], 5)
    raw = np.tile(logits, (num_draws, 1))
    tokens = draw(raw, state, np.arange(num_draws), np.zeros(num_draws)).token
    counts = np.bincount(tokens, minlength=5)
    expected = np.asarray(expected) / np.sum(expected) * num_draws
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = np.sum((counts[likely] - expected[likely]) ** 2 / expected[likely])
    assert chi_square < chi_square_bound(likely.sum())


def test_many_seeds_at_one_position_have_the_right_frequencies(make_state, chi_square_bound):
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    state = make_state([{"seed": seed} for seed in range(400)], 4)
    raw = np.tile(np.log(probabilities).astype(np.float32), (400, 1))
    counts = sum(
        np.bincount(draw(raw, state, np.full(400, length)).token, minlength=4)
        for length in range(50)
    )
    expected = probabilities * 20_000
    assert np.sum((counts - expected) ** 2 / expected) < chi_square_bound(4)


# Reports.


@functools.cache
def _log_softmax(seed, shape):
    raw = normal(shape, seed).astype(np.float64)
    top = raw.max(axis=1, keepdims=True)
    return raw - top - np.log(np.exp(raw - top).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab_size", [1, 3, 20, 300])
def test_reported_logprobs_are_of_the_raw_logits(make_state, vocab_size):
    raw, expected = normal((4, vocab_size), 8), _log_softmax(8, (4, vocab_size))
    params = {
        "temperature": 0.3,
        "top_p": 0.5,
        "repetition_penalty": 3.0,
        "logit_bias": {0: 50.0},
        "min_tokens": 3,
    }
    state = make_state([params] * 4, vocab_size, [[0]] * 4, 1, frozenset({vocab_size - 1}))
    sampled = draw(raw, state, [1] * 4, wants_top=True)
    count = min(20, vocab_size)
    for row in range(4):
        assert sampled.logprob[row] == pytest.approx(expected[row, sampled.token[row]], abs=2e-6)
        best = np.argsort(-raw[row], kind="stable")[:count]
        assert sampled.rank[row] == 1 + np.sum(raw[row] > raw[row, sampled.token[row]])
        assert sampled.top_ids[row, :count].tolist() == best.tolist()
        np.testing.assert_allclose(
            sampled.top_logprobs[row, :count], expected[row, best], atol=2e-6
        )
        assert np.all(np.isneginf(sampled.top_logprobs[row, count:])), "there are no more tokens"
    without = draw(raw, state, [1] * 4, wants_top=False)
    assert np.array_equal(without.logprob, sampled.logprob)
    assert np.array_equal(without.token, sampled.token)
    assert not np.any(without.rank)


def test_equal_logits_are_reported_by_lowest_id():
    raw = np.array([[0, 2, 1, 2, 1, 2] * 10], np.float32)
    sampled = run_report(
        jnp.asarray(raw), jax.nn.logsumexp(jnp.asarray(raw), 1), ints([3]), jnp.bool_(True)
    )
    assert sampled.top_ids[0].tolist() == np.argsort(-raw[0], kind="stable")[:20].tolist()


def test_a_target_is_scored_and_the_rest_is_sampled(make_state):
    raw, expected = normal((3, 50), 9), _log_softmax(9, (3, 50))
    state = make_state([{"temperature": 0.0}] * 3, 50)
    sampled = draw(raw, state, target=[49, -1, 0])
    assert sampled.token.tolist() == [49, np.argmax(raw[1]), 0]
    np.testing.assert_allclose(sampled.logprob, expected[range(3), sampled.token], atol=2e-6)
