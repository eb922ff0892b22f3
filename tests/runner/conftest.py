"""A row state built from SamplingParams, the way the runner builds it."""

import jax
import numpy as np
import pytest

from jaxinfer.runner.row_state import empty_row_state, make_row_reset, reset_row
from jaxinfer.sampling_params import SamplingParams

MAX_MODEL_LEN = 64

_reset_row = jax.jit(reset_row)


@pytest.fixture(scope="session")
def make_state():
    """Returns the state of one row per SamplingParams (or dict), and the dummy row."""

    def make(settings, vocab_size, token_ids=None, prompt_len=0, stop_ids=frozenset()):
        state = jax.device_put(empty_row_state(len(settings) + 1, vocab_size))
        for row, params in enumerate(settings):
            params = params if isinstance(params, SamplingParams) else SamplingParams(**params)
            ids = token_ids[row] if token_ids else []
            reset = make_row_reset(
                row,
                params,
                stop_ids | set(params.stop_token_ids),
                list(ids),
                prompt_len,
                MAX_MODEL_LEN,
                vocab_size,
            )
            state = _reset_row(state, jax.device_put(reset))
        return state

    return make


@pytest.fixture(scope="session")
def chi_square_bound():
    """Returns what a chi-square of `cells` cells stays below but once in about 10^6 draws."""

    def bound(cells):
        degrees = cells - 1
        return degrees + 4.8 * np.sqrt(2 * degrees) + 8  # normal approximation, and its skew

    return bound
