"""One layer's paged key/value cache: the array that holds it, writing to it, reading its values."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Real


def kv_shape(
    platform: str,
    dtype: DTypeLike,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[int, ...]:
    """Returns the shape of one layer's cache: `[P, page, K, 2, H]`, keys at 0 and values at 1.

    The page axis comes first, so that a page is one contiguous read of all its heads. Callers
    must not assume the trailing axes: a platform may pack them differently for a dtype.
    """
    del platform, dtype  # one layout serves them all so far
    return (num_pages, page_size, num_kv_heads, 2, head_dim)


def kv_dtype(platform: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of the array that holds a cache of `dtype` values.

    On CPU bfloat16 values are held as their bits, uint16: XLA:CPU has no bfloat16 scatter and
    widens the whole cache to float32 and back to write one token (jaxlib 0.10.2: 50 ms for
    49 MB, against 7 us).
    """
    dtype = jnp.dtype(dtype)
    is_held_as_bits = platform == "cpu" and dtype == jnp.bfloat16
    return jnp.dtype(jnp.uint16) if is_held_as_bits else dtype


def write(
    kv: Real[Array, "P page K 2 H"],
    new_kv: Float[Array, "T K 2 H"],
    slot_mapping: Int[Array, "T"],
) -> Real[Array, "P page K 2 H"]:
    """Returns the cache with token t's keys and values in slot `slot_mapping[t]`.

    `new_kv` is rounded to the cache's dtype. In place where `kv` is donated. Slots must lie
    inside the cache; of tokens that share one (padding, in page 0) any may stay there.

    Raises:
      ValueError: the shapes disagree.
    """
    if new_kv.shape[1:] != kv.shape[2:] or slot_mapping.shape != new_kv.shape[:1]:
        raise ValueError(
            f"new_kv {new_kv.shape} with slot_mapping {slot_mapping.shape} does not fit a cache "
            f"of shape {kv.shape}: pass [T, K, 2, H] and [T] for a cache [P, page, K, 2, H]"
        )
    page_size = kv.shape[1]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return kv.at[page, offset].set(encode(new_kv, kv.dtype), mode="promise_in_bounds")


def encode(values: Float[Array, "*dims"], held_as: DTypeLike) -> Real[Array, "*dims"]:
    """Rounds values to what a cache array of dtype `held_as` holds (see `kv_dtype`)."""
    if held_as == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(held_as)


def decode(held: Real[Array, "*dims"]) -> Float32[Array, "*dims"]:
    """Returns the float32 values of some of a cache's elements."""
    if held.dtype == jnp.uint16:
        held = lax.bitcast_convert_type(held, jnp.bfloat16)
    return held.astype(jnp.float32)
