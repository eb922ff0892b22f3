"""The sampler against float64 numpy: what is kept and what is drawn."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runner.draws import draw, normal, run_greedy, run_inverse_cdf, run_uniform, run_weights

# Greedy.


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 300])
def test_greedy_takes_the_lowest_of_equal_ids(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.integers(-2, 3, (50, vocab_size)).astype(np.float32)
    assert np.array_equal(run_greedy(jnp.asarray(logits)), np.argmax(logits, axis=1))


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
        run_uniform(jnp.asarray(low.view(np.int32)), jnp.asarray(high.view(np.int32)), positions)
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
    ids = np.asarray(run_inverse_cdf(jnp.asarray(weights), jnp.asarray(u)))
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
        ids = np.asarray(run_inverse_cdf(jnp.asarray(weights), jnp.full((3,), u, jnp.float32)))
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
    kept = np.asarray(run_weights(jnp.asarray(logits), make_state(settings, logits.shape[1]))) > 0
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
        kept = np.asarray(run_weights(jnp.asarray(logits), make_state([params] * 2, 6))) > 0
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
