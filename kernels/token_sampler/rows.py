"""What a row asks of the sampler, as arrays: the columns of its numbers, and masks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

Leaf = Any
"""A leaf of a pytree that also travels as numpy arrays, shapes, shardings and tracers."""

# Columns of SamplerRows.reals.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NUM_REALS = 6
# Columns of SamplerRows.integers.
TOP_K, SEED_LOW, SEED_HIGH, MIN_LENGTH, HAS_BIAS, HAS_PENALTIES = range(6)
NUM_INTEGERS = 6


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerRows:
    """What each of `R` rows asks for.

    Attributes:
      reals: temperature (0 is greedy), top_p, min_p and the three penalties.
      integers: top_k (0 is all), seed, sequence length below which stop ids are banned, flags.
      stop_ids: ids that may not come before that length; -1 where unused.
      bias_ids, bias_values: what is added to logits; id V where unused.
      counts: per token, twice its occurrences in the output, plus 1 if the prompt holds it.
    """

    reals: Leaf  # float32 [R, reals]
    integers: Leaf  # int32 [R, integers]
    stop_ids: Leaf  # int32 [R, stops]
    bias_ids: Leaf  # int32 [R, biases]
    bias_values: Leaf  # float32 [R, biases]
    counts: Leaf  # int16 [R, V]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenMasks:
    """Which tokens rows of logits may become.

    Attributes:
      words: bit i of word w of a mask is token 32·w + i.
      rows: whose mask each row of logits goes by.
      are_given: false where none restricts anything; `words` are zeros then.
    """

    words: Leaf  # uint32 [M, W]
    rows: Leaf  # int32 [B]
    are_given: Leaf  # bool []
