"""From logits to a token, on the device: shape them, choose a token, report log-probabilities.

Everything is float32. Each optional stage runs only if some row of the step asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int16, Int32, UInt32

from jaxinfer.runner import row_state as columns
from jaxinfer.runner.row_state import Leaf, RowState
from jaxinfer.sampling_params import MAX_LOGPROBS
from kernels.logit_stats import logit_stats
from kernels.logit_stats.xla import best as best_ids

BANNED = jnp.finfo(jnp.float32).min
"""A logit that is never chosen while any other is left; finite, so that no row becomes NaN."""

_CDF_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of the state that take part in a step, gathered: `B` rows of `V` logits."""

    reals: Leaf  # float32 [B, reals]
    integers: Leaf  # int32 [B, integers]
    stop_ids: Leaf  # int32 [B, stops]
    bias_ids: Leaf  # int32 [B, biases]
    bias_values: Leaf  # float32 [B, biases]

    @classmethod
    def gather(cls, state: RowState, rows: Int32[Array, " B"]) -> Rows:
        """Takes `rows` of the state."""
        fields = (
            state.reals,
            state.integers,
            state.stop_ids,
            state.bias_ids,
            state.bias_values,
        )
        return cls(*(field[rows] for field in fields))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What one step reports per row.

    Attributes:
      token: the chosen token, or the target that was scored.
      logprob: its natural log-probability under the raw logits.
      rank: how many tokens have a larger raw logit, plus 1.
      top_ids, top_logprobs: the best tokens of the raw logits, best first.
      finite: whether the raw logits were all finite.
    """

    token: Leaf  # int32 [*B]
    logprob: Leaf  # float32 [*B]
    rank: Leaf  # int32 [*B]
    top_ids: Leaf  # int32 [*B, top]
    top_logprobs: Leaf  # float32 [*B, top]
    finite: Leaf  # bool [*B]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenMasks:
    """Which tokens rows of a step may sample.

    Attributes:
      words: bit i of word w of a mask is token 32·w + i.
      rows: whose mask each row of logits goes by.
      are_given: false where none restricts anything; `words` are zeros then.
    """

    words: Leaf  # uint32 [M, W]
    rows: Leaf  # int32 [B]
    are_given: Leaf  # bool []


def uniform(
    seed_low: Int32[Array, " B"], seed_high: Int32[Array, " B"], position: Int32[Array, " B"]
) -> Float32[Array, " B"]:
    """One number in [0, 1) from a counter: the same on every platform, in any batch.

    Three rounds of MurmurHash3's 32-bit finalizer over (seed, position), 24 bits kept.
    """

    def mix(x: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> jnp.uint32(16))

    words = [lax.bitcast_convert_type(word, jnp.uint32) for word in (seed_low, seed_high, position)]
    bits = jnp.full_like(words[0], jnp.uint32(0x9E3779B9))
    for word in words:
        bits = mix(bits ^ word) + jnp.uint32(0x9E3779B9)
    return (mix(bits) >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def shape_logits(
    logits: Float32[Array, "B V"],
    rows: Rows,
    counts: Int16[Array, "R V"],
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    masks: TokenMasks | None = None,
) -> Float32[Array, "B V"]:
    """Applies bias, penalties, the ban on early stops and masks, in this order.

    `length` is the number of tokens a row's sequence has before the one being sampled.
    """
    batch = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def with_bias(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        return x.at[batch, rows.bias_ids].add(rows.bias_values, mode="drop")

    def with_penalties(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        count = counts[row_ids].astype(jnp.int32)
        occurrences = (count >> 1).astype(jnp.float32)
        repetition, presence, frequency = (
            rows.reals[:, column, None]
            for column in (columns.REPETITION, columns.PRESENCE, columns.FREQUENCY)
        )
        asked = rows.integers[:, columns.HAS_PENALTIES, None] != 0
        damped = jnp.where(x > 0, x / repetition, x * repetition)
        damped = jnp.where(count != 0, damped, x)
        damped -= frequency * occurrences + presence * (occurrences > 0).astype(jnp.float32)
        return jnp.where(asked, damped, x)

    too_short = length < rows.integers[:, columns.MIN_LENGTH]

    def without_stops(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        ids = jnp.where(too_short[:, None] & (rows.stop_ids >= 0), rows.stop_ids, x.shape[1])
        return x.at[batch, ids].set(BANNED, mode="drop")

    def masked(x: Float32[Array, "B V"], masks: TokenMasks) -> Float32[Array, "B V"]:
        words = masks.words[masks.rows][:, :, None]
        bits = (words >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
        return jnp.where(bits.reshape(x.shape[0], -1)[:, : x.shape[1]] != 0, x, BANNED)

    def unchanged(x: Float32[Array, "B V"], *_: TokenMasks) -> Float32[Array, "B V"]:
        return x

    has_bias = jnp.any(rows.integers[:, columns.HAS_BIAS] != 0)
    has_penalties = jnp.any(rows.integers[:, columns.HAS_PENALTIES] != 0)
    logits = lax.cond(has_bias, with_bias, unchanged, logits)
    logits = lax.cond(has_penalties, with_penalties, unchanged, logits)
    logits = lax.cond(jnp.any(too_short), without_stops, unchanged, logits)
    if masks is None:
        return logits
    return lax.cond(masks.are_given, masked, unchanged, logits, masks)


def choose(
    logits: Float32[Array, "B V"], rows: Rows, position: Int32[Array, " B"]
) -> Int32[Array, " B"]:
    """Picks each row's token: the best one, or the inverse CDF at the row's uniform number.

    Temperature first, then top-k, top-p over what top-k kept, min-p. Ties with the last token
    kept are kept. The CDF runs in vocabulary order.
    """
    best = best_ids(logits, jnp.max(logits, axis=1, keepdims=True))
    temperature = rows.reals[:, columns.TEMPERATURE]
    is_greedy = temperature == 0

    def draw(_: None) -> Int32[Array, " B"]:
        top = jnp.max(logits, axis=1, keepdims=True)
        scaled = (logits - top) / jnp.where(is_greedy, 1.0, temperature)[:, None]
        weights = _filtered_weights(scaled, rows)
        seed_low, seed_high = (
            rows.integers[:, column] for column in (columns.SEED_LOW, columns.SEED_HIGH)
        )
        drawn = inverse_cdf(weights, uniform(seed_low, seed_high, position))
        # Rounding can leave nothing above the drawn mass; the best token is always kept.
        return jnp.where(is_greedy | (drawn < 0), best, drawn)

    return lax.cond(jnp.all(is_greedy), lambda _: best, draw, None)


def inverse_cdf(weights: Float32[Array, "B V"], u: Float32[Array, " B"]) -> Int32[Array, " B"]:
    """First id whose cumulative weight exceeds u times the total; -1 if rounding leaves none.

    Two levels: sums of blocks of 256, then the one block the draw falls in.
    """
    batch, vocab_size = weights.shape
    padding = -vocab_size % _CDF_BLOCK
    blocks = jnp.pad(weights, ((0, 0), (0, padding))).reshape(batch, -1, _CDF_BLOCK)
    block_cdf = jnp.cumsum(jnp.sum(blocks, axis=2), axis=1)
    mass = u * block_cdf[:, -1]
    block = jnp.sum((block_cdf <= mass[:, None]).astype(jnp.int32), axis=1)
    inside_range = block < blocks.shape[1]
    block = jnp.minimum(block, blocks.shape[1] - 1)
    rows = jnp.arange(batch, dtype=jnp.int32)
    before = jnp.where(block > 0, block_cdf[rows, jnp.maximum(block - 1, 0)], 0.0)
    inside = blocks[rows, block]
    cdf = before[:, None] + jnp.cumsum(inside, axis=1)
    is_past = (cdf > mass[:, None]) & (inside > 0)
    offset = jnp.argmax(is_past, axis=1).astype(jnp.int32)
    found = inside_range & jnp.any(is_past, axis=1)
    return jnp.where(found, block * _CDF_BLOCK + offset, -1)


def _filtered_weights(scaled: Float32[Array, "B V"], rows: Rows) -> Float32[Array, "B V"]:
    """exp(scaled), zero for what top-k, top-p and min-p leave out; `scaled` is at most 0."""
    top_k = rows.integers[:, columns.TOP_K]
    top_p, min_p = rows.reals[:, columns.TOP_P], rows.reals[:, columns.MIN_P]
    weights = jnp.exp(scaled)

    def by_top_k(weights: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        ones = jnp.ones_like(weights)
        wanted = jnp.where(top_k > 0, top_k, weights.shape[1]).astype(jnp.float32)
        return jnp.where(_kept(scaled, _threshold(scaled, ones, wanted)), weights, 0.0)

    def by_top_p(weights: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        wanted = top_p * jnp.sum(weights, axis=1)
        kept = _kept(scaled, _threshold(scaled, weights, wanted))
        return jnp.where(kept | (top_p >= 1)[:, None], weights, 0.0)

    def unchanged(weights: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        return weights

    weights = lax.cond(jnp.any(top_k > 0), by_top_k, unchanged, weights)
    weights = lax.cond(jnp.any(top_p < 1), by_top_p, unchanged, weights)
    # The best token weighs 1.
    return jnp.where(weights >= min_p[:, None], weights, 0.0)


def _threshold(
    values: Float32[Array, "B V"],
    weights: Float32[Array, "B V"],
    wanted: Float32[Array, " B"],
) -> Float32[Array, " B"]:
    """The largest t with sum(weights where values >= t) >= wanted, for values <= 0.

    Bisects the bits: for values <= 0 the float order is the reverse of the order of -value's
    bits. Where even all values weigh less than wanted (rounding), everything is kept.
    """

    def step(bit: Int32[Array, ""], bits: Int32[Array, " B"]) -> Int32[Array, " B"]:
        # Find the smallest magnitude m with weight(values >= -m) >= wanted, from the top bit down:
        # keep the bit clear while everything below it already weighs enough.
        probe = bits | (jnp.int32(1) << (30 - bit))
        limit = -lax.bitcast_convert_type(probe - 1, jnp.float32)
        mass = jnp.sum(jnp.where(_kept(values, limit), weights, 0.0), axis=1)
        return jnp.where(mass >= wanted, bits, probe)

    bits = lax.fori_loop(0, 31, step, jnp.zeros(wanted.shape, jnp.int32))
    return -lax.bitcast_convert_type(bits, jnp.float32)


def _kept(values: Float32[Array, "B V"], limit: Float32[Array, " B"]) -> Bool[Array, "B V"]:
    """Values >= limit, and everything where the bisection ran past infinity into the NaNs."""
    return ~(values < limit[:, None])


def report(
    raw: Float32[Array, "B V"],
    log_total: Float32[Array, " B"],
    token: Int32[Array, " B"],
    wants_top: Bool[Array, ""],
) -> Sampled:
    """Log-probabilities of `token` and of the best tokens under the raw logits, and its rank.

    Of the best tokens, and of the rank, there are zeros unless they are wanted.
    """
    chosen = jnp.take_along_axis(raw, token[:, None], axis=1)[:, 0]
    shape = (raw.shape[0], MAX_LOGPROBS)

    def best(_: None) -> tuple[Float32[Array, "B _"], Int32[Array, "B _"], Int32[Array, " B"]]:
        count = min(MAX_LOGPROBS, raw.shape[1])
        values, ids = lax.top_k(raw, count)
        padding = ((0, 0), (0, MAX_LOGPROBS - count))
        logprobs = values - log_total[:, None]
        return (
            jnp.pad(logprobs, padding, constant_values=-jnp.inf),
            jnp.pad(ids.astype(jnp.int32), padding),
            1 + jnp.sum((raw > chosen[:, None]).astype(jnp.int32), axis=1),
        )

    def nothing(_: None) -> tuple[Float32[Array, "B _"], Int32[Array, "B _"], Int32[Array, " B"]]:
        ids = jnp.zeros(shape, jnp.int32)
        return jnp.zeros(shape, jnp.float32), ids, jnp.zeros(token.shape, jnp.int32)

    top_logprobs, top_ids, rank = lax.cond(wants_top, best, nothing, None)
    return Sampled(
        token=token,
        logprob=chosen - log_total,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finite=jnp.isfinite(log_total),
    )


# Programs of one number of rows trace and lower it once.
@partial(jax.jit, static_argnames="platform")
def sample(
    raw: Float32[Array, "B V"],
    state: RowState,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    target: Int32[Array, " B"],
    wants_top: Bool[Array, ""],
    platform: str,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Chooses a token per row, or scores `target` where it is not -1.

    `length` is the number of tokens the row's sequence has before the token in question; it is
    also the counter of the row's random numbers.
    """
    rows = Rows.gather(state, row_ids)
    stats = logit_stats(raw, platform=platform)

    def chosen(_: None) -> Int32[Array, " B"]:
        shaped = shape_logits(raw, rows, state.counts, row_ids, length, masks)
        return choose(shaped, rows, length)

    if platform == "cpu":
        # In a step where every row wants its best token, nothing else looks at the logits. Chips
        # would hold one copy of them more for it.
        is_plain = jnp.all(_wants_best(rows, length))
        if masks is not None:
            is_plain &= ~masks.are_given
        token = lax.cond(is_plain, lambda _: stats.best, chosen, None)
    else:
        token = chosen(None)
    token = jnp.where(target >= 0, target, token)
    return report(raw, stats.log_total, token, wants_top)


def _wants_best(rows: Rows, length: Int32[Array, " B"]) -> Bool[Array, " B"]:
    """Whether each row is greedy over its raw logits."""
    is_shaped = (
        (rows.integers[:, columns.HAS_BIAS] != 0)
        | (rows.integers[:, columns.HAS_PENALTIES] != 0)
        | (length < rows.integers[:, columns.MIN_LENGTH])
    )
    return (rows.reals[:, columns.TEMPERATURE] == 0) & ~is_shaped
