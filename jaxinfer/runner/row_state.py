"""What the device remembers about each running row between steps, and how a row is rebuilt.

Row `max_num_seqs`, the last, is a dummy: padding rows of a step point at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int16

from jaxinfer.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from kernels.token_sampler.rows import HAS_PENALTIES, NUM_INTEGERS, NUM_REALS, Leaf

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 4
"""Stop ids of the request and end-of-sequence ids of the model together."""

MAX_OUTPUT_COUNT = 32766
"""Twice the occurrences of a token in the output saturate here, so that int16 holds them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """Sampling state of every row; `R` rows, the dummy included.

    Attributes:
      reals: temperature (0 is greedy), top_p, min_p and the three penalties.
      integers: top_k, seed, sequence length below which stop ids are banned, flags.
      stop_ids: ids that end the row; -1 where unused.
      bias_ids, bias_values: logit bias; id V (dropped) where unused.
      counts: per token, twice its occurrences in the output, plus 1 if the prompt holds it.
      last_token: the token the row continues from.
      alive: false once a stop id was sampled.
    """

    reals: Leaf  # float32 [R, reals]
    integers: Leaf  # int32 [R, integers]
    stop_ids: Leaf  # int32 [R, stops]
    bias_ids: Leaf  # int32 [R, biases]
    bias_values: Leaf  # float32 [R, biases]
    counts: Leaf  # int16 [R, V]
    last_token: Leaf  # int32 [R]
    alive: Leaf  # bool [R]


def empty_row_state(num_rows: int, vocab_size: int) -> RowState:
    """Returns host arrays for `num_rows` dead greedy rows."""
    return RowState(
        reals=np.zeros((num_rows, NUM_REALS), np.float32),
        integers=np.zeros((num_rows, NUM_INTEGERS), np.int32),
        stop_ids=np.full((num_rows, MAX_STOP_IDS), -1, np.int32),
        bias_ids=np.full((num_rows, MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias_values=np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32),
        counts=np.zeros((num_rows, vocab_size), np.int16),
        last_token=np.zeros((num_rows,), np.int32),
        alive=np.zeros((num_rows,), np.bool_),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowReset:
    """Everything one row is rebuilt from; `C` is the longest sequence a row can hold."""

    row: Leaf  # int32 []
    reals: Leaf  # float32 [reals]
    integers: Leaf  # int32 [integers]
    stop_ids: Leaf  # int32 [stops]
    bias_ids: Leaf  # int32 [biases]
    bias_values: Leaf  # float32 [biases]
    tokens: Leaf  # int32 [C]
    prompt_len: Leaf  # int32 []
    num_tokens: Leaf  # int32 []
    last_token: Leaf  # int32 []


def make_row_reset(
    row: int,
    params: SamplingParams,
    stop_ids: frozenset[int],
    token_ids: list[int],
    prompt_len: int,
    max_model_len: int,
    vocab_size: int,
) -> RowReset:
    """Returns the host arrays that rebuild `row` for a sequence of `token_ids`."""
    seed = (params.seed or 0) % 2**64
    # Beyond the context "not yet" is the same at any length, and the sum would not fit an int32.
    min_length = prompt_len + min(params.min_tokens, max_model_len)
    ids = np.full((MAX_STOP_IDS,), -1, np.int32)
    ids[: len(stop_ids)] = sorted(stop_ids)
    bias_ids = np.full((MAX_LOGIT_BIAS,), vocab_size, np.int32)
    bias_values = np.zeros((MAX_LOGIT_BIAS,), np.float32)
    bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    tokens = np.zeros((max_model_len,), np.int32)
    if params.has_penalties:
        tokens[: len(token_ids)] = token_ids
    return RowReset(
        row=np.int32(row),
        reals=np.array(
            [
                0.0 if params.is_greedy else params.temperature,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            ],
            np.float32,
        ),
        integers=np.array(
            [
                params.top_k,
                seed & 0xFFFFFFFF,
                seed >> 32,
                min_length,
                bool(params.logit_bias),
                params.has_penalties,
            ],
            np.uint32,
        ).view(np.int32),
        stop_ids=ids,
        bias_ids=bias_ids,
        bias_values=bias_values,
        tokens=tokens,
        prompt_len=np.int32(prompt_len),
        num_tokens=np.int32(len(token_ids)),
        # A recompute may leave just this one for a decode step.
        last_token=np.int32(token_ids[-1] if token_ids else 0),
    )


def reset_row(state: RowState, reset: RowReset) -> RowState:
    """Rebuilds one row, as if its sequence had been generated in it from the start."""
    row = reset.row

    def counted(counts: Int16[Array, "R V"]) -> Int16[Array, "R V"]:
        position = jnp.arange(reset.tokens.shape[0], dtype=jnp.int32)
        vocab_size = counts.shape[1]
        prompt = jnp.where(position < reset.prompt_len, reset.tokens, vocab_size)
        is_output = (position >= reset.prompt_len) & (position < reset.num_tokens)
        output = jnp.where(is_output, reset.tokens, vocab_size)
        fresh = jnp.zeros((vocab_size,), jnp.int32)
        fresh = jnp.minimum(fresh.at[output].add(2, mode="drop"), MAX_OUTPUT_COUNT)
        fresh += jnp.zeros_like(fresh).at[prompt].set(1, mode="drop")
        return counts.at[row].set(fresh.astype(jnp.int16))

    has_penalties = reset.integers[HAS_PENALTIES] != 0
    return RowState(
        reals=state.reals.at[row].set(reset.reals),
        integers=state.integers.at[row].set(reset.integers),
        stop_ids=state.stop_ids.at[row].set(reset.stop_ids),
        bias_ids=state.bias_ids.at[row].set(reset.bias_ids),
        bias_values=state.bias_values.at[row].set(reset.bias_values),
        counts=jax.lax.cond(has_penalties, counted, lambda counts: counts, state.counts),
        last_token=state.last_token.at[row].set(reset.last_token),
        alive=state.alive.at[row].set(True),
    )
