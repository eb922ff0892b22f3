"""The sampler against float64 numpy: what is kept, what is drawn, what is reported."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.runner.sampling import (
    Rows,
    _filtered_weights,
    choose,
    greedy,
    inverse_cdf,
    report,
    sample,
    shape_logits,
    uniform,
)

_uniform = jax.jit(uniform)
_greedy = jax.jit(greedy)
_inverse_cdf = jax.jit(inverse_cdf)
_sample = jax.jit(sample)
_report = jax.jit(report)
_shape = jax.jit(shape_logits)


@jax.jit
def _weights(logits, state):
    """Weights `choose` draws from, for every row of the state but the dummy."""
    rows = Rows.gather(state, jnp.arange(logits.shape[0], dtype=jnp.int32))
    temperature = jnp.where(rows.reals[:, 0] == 0, 1.0, rows.reals[:, 0])
    top = jnp.max(logits, axis=1, keepdims=True)
    return _filtered_weights((logits - top) / temperature[:, None], rows)


def ints(values):
    return jnp.asarray(np.asarray(values, np.int64).astype(np.int32))


def draw(raw, state, length=None, rows=None, target=None, wants_top=False):
    """One `sample` over the rows of `state`, as numpy."""
    raw = np.asarray(raw, np.float32)
    rows = np.arange(len(raw)) if rows is None else rows
    length = np.zeros(len(raw)) if length is None else length
    target = np.full(len(raw), -1) if target is None else target
    sampled = _sample(
        jnp.asarray(raw), state, ints(rows), ints(length), ints(target), jnp.bool_(wants_top)
    )
    return jax.tree.map(np.asarray, sampled)


def normal(shape, seed, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


# Greedy.


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 300])
def test_greedy_takes_the_lowest_of_equal_ids(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-2, 3, (50, vocab_size)).astype(np.float32)
    assert np.array_equal(_greedy(jnp.asarray(logits)), np.argmax(logits, axis=1))


# The uniform number.


def reference_uniform(seed, position):
    """The same counter hash in Python integers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    seed %= 2**64
    bits = 0x9E3779B9
    for word in (seed & 0xFFFFFFFF, seed >> 32, position):
        bits = (mix(bits ^ word) + 0x9E3779B9) % 2**32
    return (mix(bits) >> 8) / 2**24


def uniforms(seeds, positions):
    seeds = np.asarray(seeds, np.int64).view(np.uint64)
    low, high = (seeds & 0xFFFFFFFF).astype(np.uint32), (seeds >> 32).astype(np.uint32)
    positions = jnp.asarray(np.asarray(positions, np.int32))
    return np.asarray(
        _uniform(jnp.asarray(low.view(np.int32)), jnp.asarray(high.view(np.int32)), positions)
    )


def test_uniform_is_the_hash_it_says_and_does_not_depend_on_the_batch():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 12345678901234, 7]
    positions = [0, 1, 255, 2**20, 5, 6, 7, 131071]
    together = uniforms(seeds, positions)
    assert together.tolist() == [
        reference_uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)
    ]
    assert np.all((together >= 0) & (together < 1))
    for index, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert uniforms([seed], [position])[0] == together[index]


@pytest.mark.parametrize(
    "first_seed", [0, 2**32 - 100, -(2**63)], ids=["small", "across the words", "lowest"]
)
def test_uniform_is_uniform_and_neighbours_are_independent(first_seed, chi_square_bound):
    size = 256
    seeds, positions = np.meshgrid(first_seed + np.arange(size), np.arange(size), indexing="ij")
    u = uniforms(seeds.ravel(), positions.ravel()).reshape(size, size)

    def chi_square(cells, count):
        expected = cells.size / count
        return np.sum((np.bincount(cells.ravel(), minlength=count) - expected) ** 2) / expected

    assert chi_square((u * 64).astype(int), 64) < chi_square_bound(64)
    for low_bits in (2**16, 2**20):  # the digits that follow are as good as the first
        digit = (u * low_bits * 16).astype(int) % 16
        assert chi_square(digit, 16) < chi_square_bound(16)
    cell = (u * 16).astype(int)
    neighbours = {
        "position": (cell[:, :-1], cell[:, 1:]),
        "seed": (cell[:-1], cell[1:]),
        "both": (cell[:-1, :-1], cell[1:, 1:]),
        "crossed": (cell[1:, :-1], cell[:-1, 1:]),
    }
    for name, (one, other) in neighbours.items():
        assert chi_square(one * 16 + other, 256) < chi_square_bound(256), name
    # Each seed's own stream, and each position over the seeds.
    for axis in (0, 1):
        assert np.all(np.abs(u.mean(axis=axis) - 0.5) < 5 / math.sqrt(12 * size))


# The inverse CDF.


@settings(max_examples=200, deadline=None)
@given(
    vocab_size=st.sampled_from([1, 5, 255, 256, 257, 700]),
    seed=st.integers(0, 2**32),
    sparsity=st.sampled_from([0.0, 0.5, 0.99]),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
)
def test_inverse_cdf_is_searchsorted(vocab_size, seed, sparsity, spread):
    rng = np.random.default_rng(seed)
    weights = np.exp(-spread * rng.random((4, vocab_size))).astype(np.float32)
    weights[rng.random(weights.shape) < sparsity] = 0
    weights[np.arange(4), rng.integers(0, vocab_size, 4)] = 1
    u = rng.integers(0, 2**24, 4).astype(np.float32) / np.float32(2**24)
    u[0] = seed % 2 * np.float32(1 - 2.0**-24)  # the ends of the range
    ids = np.asarray(_inverse_cdf(jnp.asarray(weights), jnp.asarray(u)))
    for row in range(4):
        cdf = np.cumsum(weights[row].astype(np.float64))
        mass = float(u[row]) * cdf[-1]
        expected = np.searchsorted(cdf, mass, side="right")
        if ids[row] == expected:
            continue
        # Next to an edge float32 may fall to the other side, or (-1) past the end.
        edge = np.min(np.abs(cdf - mass)) / cdf[-1]
        assert edge < 1e-6, (ids[row], expected)
        if ids[row] < 0:
            assert 1 - u[row] < 1e-6
        else:
            assert weights[row, ids[row]] > 0
            assert abs(cdf[ids[row]] - mass) / cdf[-1] < 1e-6 or (
                abs(cdf[ids[row]] - weights[row, ids[row]] - mass) / cdf[-1] < 1e-6
            )


def test_inverse_cdf_never_draws_what_weighs_nothing():
    weights = np.zeros((3, 600), np.float32)
    weights[0, 0] = weights[1, 599] = 1
    weights[2, [255, 256, 511]] = 1e-30, 1, 1e-30
    for u in (0.0, 0.5, 1 - 2.0**-24):
        ids = np.asarray(_inverse_cdf(jnp.asarray(weights), jnp.full((3,), u, jnp.float32)))
        assert ids[0] == 0
        assert ids[1] == 599
        assert ids[2] in (255, 256, -1)


# What is kept.


def reference_kept(logits, params):
    """(kept, distance of the nearest decision to a tie that only rounding decides)."""
    temperature = np.float32(params.get("temperature", 1.0))
    scaled = ((logits - logits.max()) / temperature).astype(np.float32)
    weights = np.exp(scaled.astype(np.float64))
    descending = np.sort(scaled)[::-1]
    kept = np.ones(len(logits), bool)
    margin = 1.0
    if 0 < params.get("top_k", 0) <= len(logits):
        kept &= scaled >= descending[params["top_k"] - 1]
    if params.get("top_p", 1.0) < 1:
        weights = np.where(kept, weights, 0.0)
        cdf = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
        last = np.searchsorted(cdf, params["top_p"], side="left")
        margin = np.min(np.abs(cdf - params["top_p"]))
        kept &= scaled >= descending[min(last, len(cdf) - 1)]
    if params.get("min_p", 0.0) > 0:
        kept &= weights >= params["min_p"]
        others = weights[scaled < 0]
        margin = min(margin, np.min(np.abs(others - params["min_p"]), initial=1.0))
    return kept, margin


def check_kept(make_state, logits, settings):
    kept = np.asarray(_weights(jnp.asarray(logits), make_state(settings, logits.shape[1]))) > 0
    for row, params in enumerate(settings):
        expected, margin = reference_kept(logits[row], params)
        assert margin < 1e-5 or np.array_equal(kept[row], expected), (row, params)


filters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([2, 3, 10, 36, 37, 38, 10_000, 2**31 - 1]),
        "top_p": st.sampled_from([1e-9, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(filters, min_size=4, max_size=4),
    seed=st.integers(0, 2**32),
    ties=st.booleans(),
)
def test_top_k_top_p_min_p_keep_what_sorting_keeps(make_state, rows, seed, ties):
    logits = normal((4, 37), seed)
    if ties:
        logits = np.round(logits)
    check_kept(make_state, logits, rows)


@pytest.mark.parametrize("vocab_size", [1, 2, 257, 1000])
def test_filters_at_other_vocabularies(make_state, vocab_size):
    rows = [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.5}, {"min_p": 0.1}, {}]
    check_kept(make_state, normal((4, vocab_size), vocab_size), rows)


def test_ties_with_the_last_kept_token_are_kept(make_state):
    logits = np.array([[1, 3, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]], np.float32)
    for params, first, second in [
        ({"top_k": 2}, [1, 2, 3, 4], range(6)),
        ({"top_p": 0.6}, [1, 2, 3, 4], range(6)),
        ({"min_p": 1.0}, [1], range(6)),
    ]:
        kept = np.asarray(_weights(jnp.asarray(logits), make_state([params] * 2, 6))) > 0
        assert np.flatnonzero(kept[0]).tolist() == first
        assert np.flatnonzero(kept[1]).tolist() == list(second)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1, "temperature": 2.0},
        {"top_p": 0.0},
        {"top_p": 1e-9},
        {"top_p": 1e-45},
        {"min_p": 1.0},
        {"temperature": 0.0},
        {"temperature": 5e-324},
        {"temperature": 1e-40},
        {"temperature": 1e-9},
        {"temperature": 1e-5},
        {"temperature": 1.01e-5},
        {"temperature": 1e-4},
        {"temperature": 1e-3},
    ],
    ids=str,
)
def test_degenerate_settings_are_greedy(make_state, params):
    logits = normal((64, 300), 1)
    best = np.argmax(logits, axis=1)
    logits[np.arange(64), best] += 0.5
    # Two kinds of neighbours take other paths through the same program.
    mixed = [{**params, "seed": row} for row in range(62)] + [{"top_k": 5}, {"top_p": 0.3}]
    tokens = draw(logits, make_state(mixed, 300)).token
    assert np.array_equal(tokens[:62], best[:62])


def test_a_row_does_not_feel_its_neighbours(make_state):
    logits = normal((6, 300), 2)
    settings = [
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.3, "top_k": 7, "seed": 4},
        {"top_p": 0.7, "seed": 5},
        {"min_p": 0.2, "seed": 6},
        {"temperature": 0.0},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": {5: 9.0}, "seed": 7},
    ]
    tokens = [[row, row + 1, 40 + row] for row in range(6)]
    length = np.arange(6) + 3
    together = draw(logits, make_state(settings, 300, tokens, 1), length, wants_top=True)
    for row in range(6):
        order = [row, *(other for other in range(6) if other != row)]
        plain = [settings[row]] + [{"temperature": 0.0}] * 5
        history = [tokens[row]] + [[]] * 5
        alone = draw(
            logits[order], make_state(plain, 300, history, 1), length[order], wants_top=True
        )
        for field in ("token", "logprob", "top_ids", "top_logprobs"):
            mine, theirs = getattr(together, field)[row], getattr(alone, field)[0]
            assert np.array_equal(mine, theirs), (row, field)


# Penalties, bias, bans.


def reference_shaped(logits, params, prompt, output, stop_ids=()):
    x = logits.astype(np.float64)
    for token, bias in params.get("logit_bias", {}).items():
        x[token] += bias
    for token in range(len(x)):
        times = output.count(token)
        if times or token in prompt:
            penalty = params.get("repetition_penalty", 1.0)
            x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= times * params.get("frequency_penalty", 0.0)
        x[token] -= (times > 0) * params.get("presence_penalty", 0.0)
    if len(output) < params.get("min_tokens", 0):
        x[list(stop_ids)] = np.finfo(np.float32).min
    return x


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
    state = make_state(rows, 19, tokens, prompt_len, stop_ids)
    ids = ints(range(3))
    shaped = np.asarray(
        _shape(jnp.asarray(logits), Rows.gather(state, ids), state.counts, ids, ints([14] * 3))
    )
    for row, params in enumerate(rows):
        prompt, output = tokens[row][:prompt_len], tokens[row][prompt_len:]
        expected = reference_shaped(logits[row], params, prompt, output, stop_ids)
        np.testing.assert_allclose(shaped[row], expected, rtol=2e-5, atol=2e-4)


def test_no_stage_runs_unasked(make_state):
    logits = normal((2, 19), 0)
    state = make_state([{}, {}], 19, [[1, 2, 3]] * 2, 1, frozenset({4}))
    ids = ints([0, 1])
    rows = Rows.gather(state, ids)
    shaped = _shape(jnp.asarray(logits), rows, state.counts, ids, ints([3, 3]))
    assert np.array_equal(shaped, logits)


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
        assert sampled.top_ids[row, :count].tolist() == best.tolist()
        np.testing.assert_allclose(
            sampled.top_logprobs[row, :count], expected[row, best], atol=2e-6
        )
        assert np.all(np.isneginf(sampled.top_logprobs[row, count:])), "there are no more tokens"
    without = draw(raw, state, [1] * 4, wants_top=False)
    assert np.array_equal(without.logprob, sampled.logprob)
    assert np.array_equal(without.token, sampled.token)


def test_equal_logits_are_reported_by_lowest_id():
    raw = np.array([[0, 2, 1, 2, 1, 2] * 10], np.float32)
    sampled = _report(jnp.asarray(raw), ints([3]), jnp.bool_(True))
    assert sampled.top_ids[0].tolist() == np.argsort(-raw[0], kind="stable")[:20].tolist()


def test_a_target_is_scored_and_the_rest_is_sampled(make_state):
    raw, expected = normal((3, 50), 9), _log_softmax(9, (3, 50))
    state = make_state([{"temperature": 0.0}] * 3, 50)
    sampled = draw(raw, state, target=[49, -1, 0])
    assert sampled.token.tolist() == [49, np.argmax(raw[1]), 0]
    np.testing.assert_allclose(sampled.logprob, expected[range(3), sampled.token], atol=2e-6)


def test_a_drawn_token_is_the_inverse_cdf_at_the_rows_number(make_state):
    raw = normal((8, 500), 4)
    seeds, lengths = [0, 1, -5, 2**63 - 1, 2**32, 9, 10, 11], [1, 2, 3, 4, 5, 6, 7, 8]
    state = make_state([{"seed": seed} for seed in seeds], 500)
    tokens = draw(raw, state, lengths).token
    for row in range(8):
        cdf = np.cumsum(np.exp(raw[row].astype(np.float64)))
        mass = reference_uniform(seeds[row], lengths[row]) * cdf[-1]
        assert np.min(np.abs(cdf - mass)) / cdf[-1] > 1e-6, "choose other seeds"
        assert tokens[row] == np.searchsorted(cdf, mass, side="right")


def test_choose_is_what_sample_uses(make_state):
    raw = normal((2, 64), 6)
    state = make_state([{"seed": 1, "top_p": 0.9}, {"temperature": 0.0}], 64)
    rows = Rows.gather(state, ints([0, 1]))
    tokens = jax.jit(choose)(jnp.asarray(raw), rows, ints([5, 5]))
    assert np.array_equal(tokens, draw(raw, state, [5, 5]).token)
