"""How quantized codes become numbers in a TPU's registers: words, codebooks, float16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import BFloat16, Float32, Int32

Ref: TypeAlias = Any

LANES = 128
WORD_BIAS = {"int4": 24.0, "uint4": 16.0}
"""What `unpack_words` makes codes too large by."""


def unpack_words(codes: Array, code: str) -> BFloat16[Array, "O I"]:
    """Returns 4-bit codes `[O, I]` plus their WORD_BIAS, rows in the order of `to_word_order`.

    A 32-bit word holds a column of eight rows. A mask leaves two of them, four rows apart, each in
    the top mantissa bits of a bfloat16 whose exponent makes it 16 + code: three operations where
    chips without bfloat16 arithmetic need ten. A signed code's top bit is flipped, so it is
    code + 8 that is added to 16. O is a multiple of 64.
    """
    words = pltpu.bitcast(codes, jnp.int32)  # [O / 8, I]
    exponent = 0x41C041C0 if code == "int4" else 0x41804180
    pairs = []
    for row in range(4):
        shifted = words << 3 if row == 0 else words >> (4 * row - 3)
        pairs.append((shifted & 0x00780078) ^ exponent)
    blocks = [pair[start : start + 8] for start in range(0, words.shape[0], 8) for pair in pairs]
    return pltpu.bitcast(jnp.concatenate(blocks), jnp.bfloat16)


def to_word_order(values: Float32[Array, "G O"]) -> Float32[Array, "G O"]:
    """Puts a value per weight row where `unpack_words` puts the row. O is a multiple of 128."""
    return _permute_lanes(
        values,
        # Bits of a position in 64, high to low: 2 of the row in its half word, 3 of the word, 1 of
        # the half.
        lambda position: (
            (position & -64)
            + ((position >> 1 & 7) << 3)
            + ((position & 1) << 2)
            + (position >> 4 & 3)
        ),
    )


def from_word_order(values: Float32[Array, "T O"]) -> Float32[Array, "T O"]:
    """Undoes `to_word_order`."""
    return _permute_lanes(
        values,
        lambda row: (row & -64) + ((row & 3) << 4) + ((row >> 3 & 7) << 1) + (row >> 2 & 1),
    )


def _permute_lanes(values: Array, source: Callable[[Array], Array]) -> Array:
    """Returns `values[:, source(lane)]` within each 128 lanes."""
    num_rows = values.shape[0]
    if num_rows == 1:  # which a gather cannot have
        values = jnp.broadcast_to(values, (8, values.shape[1]))
    index = source(lax.broadcasted_iota(jnp.int32, (values.shape[0], LANES), 1))
    parts = [
        gather(values[:, start : start + LANES], index, axis=1)
        for start in range(0, values.shape[1], LANES)
    ]
    return jnp.concatenate(parts, axis=1)[:num_rows]


def gather(values: Array, index: Int32[Array, "..."], axis: int) -> Array:
    """Returns `take_along_axis` of indices that are in range: no instructions to check them."""
    return jnp.take_along_axis(values, index, axis=axis, mode="promise_in_bounds")


def fill_table(table: Ref, codebook: Ref) -> None:
    """Puts each of a codebook's 16 values in a row of a table `[16, 128]` in VMEM."""
    for index in range(16):
        table[index : index + 1] = jnp.full((1, LANES), codebook[index], jnp.float32)


def look_up(table: Ref, codes: Int32[Array, "O I"]) -> Float32[Array, "O I"]:
    """Returns a codebook's values: two gathers over the eight sublanes of a register.

    A gather over lanes could do it in one, but takes eight times as long.
    """
    num_rows, num_columns = codes.shape
    codes = jnp.pad(codes, ((0, -num_rows % 8), (0, -num_columns % LANES)))
    codes = codes.reshape(-1, 8, codes.shape[1])
    blocks = []
    for start in range(0, codes.shape[2], LANES):
        block = codes[:, :, start : start + LANES]
        low, high = (
            gather(jnp.broadcast_to(half[None], block.shape), block & 7, axis=1)
            for half in (table[:8], table[8:])
        )
        blocks.append(jnp.where(block < 8, low, high))
    values = jnp.concatenate(blocks, axis=2)
    return values.reshape(-1, values.shape[2])[:num_rows, :num_columns]


def as_loadable(values: Array) -> Array:
    """Returns float16 as int16 with its bits, since TPUs cannot load it; others as they are."""
    if values.dtype != jnp.float16:
        return values
    return lax.bitcast_convert_type(values, jnp.int16)


def to_float32(values: Array) -> Float32[Array, "..."]:
    """Undoes `as_loadable`, in float32. Finite values only; subnormal ones are exact too."""
    if values.dtype != jnp.int16:
        return values.astype(jnp.float32)
    bits = values.astype(jnp.int32)
    exponent, mantissa = bits >> 10 & 31, bits & 1023
    mantissa = jnp.where(exponent > 0, mantissa | 1024, mantissa)
    power = lax.bitcast_convert_type((jnp.maximum(exponent, 1) + 102) << 23, jnp.float32)
    magnitude = mantissa.astype(jnp.float32) * power
    return jnp.where(bits < 0, -magnitude, magnitude)
