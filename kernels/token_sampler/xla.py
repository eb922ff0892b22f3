"""The sampler in jnp: shape logits, choose a token.

Everything is float32. Each optional stage runs only if some row asks for it.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from kernels.logit_stats.xla import best as best_ids
from kernels.token_sampler import rows as columns
from kernels.token_sampler.rows import SamplerRows, TokenMasks

__all__ = ["choose_tokens", "supports", "uniform"]

BANNED = jnp.finfo(jnp.float32).min
"""A logit that is never chosen while any other is left; finite, so that no row becomes NaN."""

_CDF_BLOCK = 256


def supports(logits: Array | jax.ShapeDtypeStruct) -> None:
    """Refuses nothing."""


def choose_tokens(
    logits: Float32[Array, "B V"],
    best: Int32[Array, " B"],
    rows: SamplerRows,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    masks: TokenMasks | None = None,
    *,
    platform: str,
) -> Int32[Array, " B"]:
    """See `kernels.token_sampler`."""
    mine = replace(
        rows,  # counts are large: taken where they are wanted
        reals=rows.reals[row_ids],
        integers=rows.integers[row_ids],
        stop_ids=rows.stop_ids[row_ids],
        bias_ids=rows.bias_ids[row_ids],
        bias_values=rows.bias_values[row_ids],
    )

    def chosen(_: None) -> Int32[Array, " B"]:
        shaped = shape_logits(logits, mine, row_ids, length, masks)
        return choose(shaped, mine, length)

    if platform != "cpu":
        return chosen(None)
    # In a step where every row wants its best token, nothing else looks at the logits. Chips
    # would hold one copy of them more for it.
    is_plain = jnp.all(_wants_best(mine, length))
    if masks is not None:
        is_plain &= ~masks.are_given
    return lax.cond(is_plain, lambda _: best, chosen, None)


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
    rows: SamplerRows,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    masks: TokenMasks | None = None,
) -> Float32[Array, "B V"]:
    """Applies bias, penalties, the ban on early stops and masks, in this order.

    All of `rows` but its counts are those of the logits.
    """
    batch = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def with_bias(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        return x.at[batch, rows.bias_ids].add(rows.bias_values, mode="drop")

    def with_penalties(x: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        count = rows.counts[row_ids].astype(jnp.int32)
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
    logits: Float32[Array, "B V"], rows: SamplerRows, position: Int32[Array, " B"]
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


def _filtered_weights(scaled: Float32[Array, "B V"], rows: SamplerRows) -> Float32[Array, "B V"]:
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


def _wants_best(rows: SamplerRows, length: Int32[Array, " B"]) -> Bool[Array, " B"]:
    """Whether each row is greedy over its raw logits."""
    is_shaped = (
        (rows.integers[:, columns.HAS_BIAS] != 0)
        | (rows.integers[:, columns.HAS_PENALTIES] != 0)
        | (length < rows.integers[:, columns.MIN_LENGTH])
    )
    return (rows.reals[:, columns.TEMPERATURE] == 0) & ~is_shaped
