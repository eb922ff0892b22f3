"""A rebuilt row equals one that lived through its sequence; the dummy row never lives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.runner.programs import _after_sampling
from jaxinfer.runner.row_state import empty_row_state, make_row_reset, reset_row
from jaxinfer.sampling_params import SamplingParams
from kernels.token_sampler.rows import MIN_LENGTH

VOCAB_SIZE, NUM_ROWS, MAX_MODEL_LEN = 11, 3, 24
PENALISED = SamplingParams(frequency_penalty=0.5)

_reset_row = jax.jit(reset_row)
_after = jax.jit(_after_sampling)


def rebuild(state, row, params, tokens, prompt_len, stop_ids=frozenset(), max_model_len=24):
    vocab_size = state.counts.shape[1]
    reset = make_row_reset(row, params, stop_ids, tokens, prompt_len, max_model_len, vocab_size)
    return _reset_row(state, jax.device_put(reset))


def fresh():
    return jax.device_put(empty_row_state(NUM_ROWS + 1, VOCAB_SIZE))


def after(state, rows, tokens, lengths, sampled):
    return _after(
        state,
        jnp.asarray(rows, jnp.int32),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(sampled, jnp.bool_),
    )


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8), min_size=3, max_size=3
    ),
    outputs=st.lists(
        st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12), min_size=3, max_size=3
    ),
    penalised=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_counts_rebuilt_equal_counts_accumulated(prompts, outputs, penalised):
    params = [PENALISED if asks else SamplingParams() for asks in penalised]
    state = fresh()
    for row in range(NUM_ROWS):
        state = rebuild(state, row, params[row], prompts[row], len(prompts[row]))
    for step in range(max(map(len, outputs))):
        running = [row for row in range(NUM_ROWS) if step < len(outputs[row])]
        # Padding rows point at the dummy; others are there but sample nothing.
        rows = running + [NUM_ROWS] * (NUM_ROWS - len(running)) + [0]
        tokens = [outputs[row][step] if row < NUM_ROWS else 7 for row in rows[:-1]] + [5]
        lengths = [len(prompts[row]) + step if row < NUM_ROWS else 0 for row in rows[:-1]] + [0]
        sampled = [row < NUM_ROWS for row in rows[:-1]] + [False]
        state = after(state, rows, tokens, lengths, sampled)
    for row in range(NUM_ROWS):
        assert state.last_token[row] == outputs[row][-1]
        assert state.alive[row]
        if penalised[row]:
            tokens = prompts[row] + outputs[row]
            rebuilt = rebuild(fresh(), row, params[row], tokens, len(prompts[row]))
            assert np.array_equal(rebuilt.counts[row], state.counts[row])
            expected = 2 * np.bincount(outputs[row], minlength=VOCAB_SIZE)
            expected[list(set(prompts[row]))] += 1
            assert np.array_equal(state.counts[row], expected)
    assert not state.alive[NUM_ROWS], "the dummy row"
    assert not np.any(state.counts[NUM_ROWS])


@pytest.mark.parametrize("in_prompt", [False, True])
def test_counts_saturate_alike_however_they_came_about(in_prompt):
    num_output, length = 17_000, 17_003
    tokens = [2 if in_prompt else 1, 3, 4] + [2] * num_output
    rebuilt = rebuild(fresh(), 1, PENALISED, tokens, 3, max_model_len=length)
    state = rebuild(fresh(), 1, PENALISED, tokens[:3], 3, max_model_len=length)

    @functools.partial(jax.jit, donate_argnums=0)
    def live(state):
        one = lambda values, dtype: jnp.asarray(values, dtype)
        return jax.lax.fori_loop(
            0,
            num_output,
            lambda _, state: _after_sampling(
                state,
                one([1], jnp.int32),
                one([2], jnp.int32),
                one([9], jnp.int32),
                one([True], jnp.bool_),
            ),
            state,
        )

    lived = live(state)
    assert np.array_equal(rebuilt.counts, lived.counts)
    assert rebuilt.counts[1, 2] == 32766 + in_prompt


def test_a_row_without_penalties_ignores_what_was_there_before():
    state = rebuild(fresh(), 0, PENALISED, [1, 2, 3], 1)
    state = rebuild(state, 0, SamplingParams(), [4], 1)
    assert not state.integers[0, 5], "no penalties are asked for"
    state = rebuild(state, 0, PENALISED, [4, 4], 1)
    assert state.counts[0].tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0]


def test_a_stop_id_ends_its_row_alone_once_it_is_long_enough():
    stop_ids = frozenset({5, 6})
    state = fresh()
    for row in range(NUM_ROWS):
        state = rebuild(state, row, SamplingParams(min_tokens=row), [1, 2], 2, stop_ids)
    state = after(state, [0, 1, 2], [5, 5, 5], [2, 2, 2], [True] * 3)
    assert state.alive.tolist() == [False, True, True, False]
    state = after(state, [1, 2, NUM_ROWS], [4, 6, 6], [3, 3, 3], [True, True, False])
    assert state.alive.tolist() == [False, True, True, False]
    state = after(state, [1, 2, NUM_ROWS], [6, 6, 6], [4, 4, 4], [True, True, False])
    assert state.alive.tolist() == [False, False, False, False]
    assert rebuild(state, 0, SamplingParams(), [1], 1).alive.tolist() == [True] + [False] * 3


@pytest.mark.parametrize("min_tokens", [0, 1, 2**31 - 1])
def test_min_length_fits_an_int32(min_tokens):
    params = SamplingParams(min_tokens=min_tokens)
    reset = make_row_reset(0, params, frozenset(), [1] * 20, 20, MAX_MODEL_LEN, VOCAB_SIZE)
    assert reset.integers[MIN_LENGTH] == 20 + min(min_tokens, MAX_MODEL_LEN)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), None])
def test_every_seed_is_carried_whole(seed):
    params = SamplingParams(seed=seed)
    reset = make_row_reset(0, params, frozenset(), [1], 1, MAX_MODEL_LEN, VOCAB_SIZE)
    low, high = (int(word) for word in reset.integers.view(np.uint32)[1:3])
    assert low + (high << 32) == (seed or 0) % 2**64


def test_a_rebuilt_row_continues_from_its_last_token():
    """A recompute whose chunks leave one token goes on as a decode, from the device's token."""
    state = rebuild(fresh(), 1, SamplingParams(), [4, 9, 8], 2)
    assert state.last_token.tolist() == [0, 8, 0, 0]
