"""The sampler of a step over rows as the runner makes them: numbers, settings, neighbours."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import token_sampler_reference as reference
from runner.draws import draw, normal, run_uniform

# The uniform number.


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
        reference.uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)
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


# Rows.


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
        mass = reference.uniform(seeds[row], lengths[row]) * cdf[-1]
        assert np.min(np.abs(cdf - mass)) / cdf[-1] > 1e-6, "choose other seeds"
        assert tokens[row] == np.searchsorted(cdf, mass, side="right")
