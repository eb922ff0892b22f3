"""One layer's paged key/value cache: what holds it, how it is laid out, what its elements mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int8, Real

from kernels.paged_attention.metadata import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKV:
    """A cache of 8-bit codes; a pytree. The value of an element is its scale times its code.

    All elements of one token, head and half share a scale. So key scales may multiply the scores,
    and value scales the probabilities. A scale that was never written may be NaN.

    Attributes:
      values: int8 codes of -127 to 127, of `kv_shape(...)`.
      scales: float32 `[P, K, 2, page]`; tokens last, so that a page's scales of a head are a row.
    """

    values: Leaf
    scales: Leaf


KVCache: TypeAlias = Array | QuantizedKV
KVStruct: TypeAlias = jax.ShapeDtypeStruct | QuantizedKV


class KVDims(NamedTuple):
    """Sizes of one layer's cache, however it is laid out."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


def kv_shape(
    platform: str,
    dtype: DTypeLike,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[int, ...]:
    """Returns the shape of one layer's values: `[P, page, K, 2, H]`, keys at 0 and values at 1.

    The page axis comes first, so that a page is one contiguous read of all its heads. A TPU pads
    the last axis to 128: where it would pad less, keys and values share it, `[P, page, K, 2 * H]`,
    which are the same bytes in the same order. Use `kv_dims` and `as_rows` to not care.
    """
    del dtype  # the layouts of a platform serve all of them so far
    pages = (num_pages, page_size, num_kv_heads)
    if platform == "tpu" and _padded(2 * head_dim) < 2 * _padded(head_dim):
        return (*pages, 2 * head_dim)
    return (*pages, 2, head_dim)


def kv_dtype(platform: str, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of the array that holds a cache of `dtype` values.

    On CPU bfloat16 values are held as their bits, uint16: XLA:CPU has no bfloat16 scatter and
    widens the whole cache to float32 and back to write one token (jaxlib 0.10.2: 50 ms for
    49 MB, against 7 us).
    """
    dtype = jnp.dtype(dtype)
    is_held_as_bits = platform == "cpu" and dtype == jnp.bfloat16
    return jnp.dtype(jnp.uint16) if is_held_as_bits else dtype


def kv_structs(
    platform: str,
    dtype: DTypeLike,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
) -> KVStruct:
    """Returns what to allocate for one layer's cache of `dtype` values; int8 comes with scales."""
    shape = kv_shape(platform, dtype, num_pages, page_size, num_kv_heads, head_dim)
    values = jax.ShapeDtypeStruct(shape, kv_dtype(platform, dtype))
    if values.dtype != jnp.int8:
        return values
    scales = (num_pages, num_kv_heads, 2, page_size)
    return QuantizedKV(values, jax.ShapeDtypeStruct(scales, jnp.float32))


def kv_partition(kv: KVCache | KVStruct, axis: str) -> PartitionSpec | QuantizedKV:
    """Returns the PartitionSpecs of a cache, in its structure, with its heads over a mesh axis."""
    values = PartitionSpec(None, None, axis)
    return QuantizedKV(values, PartitionSpec(None, axis)) if isinstance(kv, QuantizedKV) else values


def kv_dims(kv: KVCache | KVStruct) -> KVDims:
    """Returns the sizes of a cache, whichever way its axes are packed."""
    shape = kv.values.shape if isinstance(kv, QuantizedKV) else kv.shape
    num_pages, page_size, num_kv_heads, *heads = shape
    return KVDims(num_pages, page_size, num_kv_heads, math.prod(heads) // 2)


def as_rows(held: Real[Array, "pages page K *heads"]) -> Real[Array, "pages page K 2 H"]:
    """Views some pages of a cache's values with keys and values apart, however they are packed."""
    return held if held.ndim == 5 else held.reshape(*held.shape[:3], 2, -1)


def encode_rows(
    values: Real[Array, "T K 2 H"], held: Array | jax.ShapeDtypeStruct
) -> Real[Array, "T K *heads"]:
    """Returns rows (of a quantized cache: codes) as a cache's values hold them, packed alike."""
    return encode(values, held.dtype).reshape(-1, *held.shape[2:])


def quantize_kv(
    new_kv: Float[Array, "T K 2 H"],
) -> tuple[Int8[Array, "T K 2 H"], Float32[Array, "T K 2"]]:
    """Returns codes and scales of keys and values, rounded to nearest (see `QuantizedKV`).

    The largest magnitude of a token, head and half gets the code 127; zeros get the scale 0.
    """
    values = new_kv.astype(jnp.float32)
    scales = jnp.abs(values).max(-1) / 127
    codes = jnp.round(values / jnp.where(scales > 0, scales, 1.0)[..., None])
    return jnp.clip(codes, -127, 127).astype(jnp.int8), scales


def encode(values: Real[Array, "*dims"], held_as: DTypeLike) -> Real[Array, "*dims"]:
    """Rounds values to what a cache array of dtype `held_as` holds (see `kv_dtype`)."""
    if held_as == jnp.uint16:
        return lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(held_as)


def decode(held: Real[Array, "*dims"]) -> Float32[Array, "*dims"]:
    """Returns the float32 values (of a quantized cache: codes) of some of a cache's elements."""
    if held.dtype == jnp.uint16:
        held = lax.bitcast_convert_type(held, jnp.bfloat16)
    return held.astype(jnp.float32)


def _padded(size: int) -> int:
    """The lanes of a TPU that an axis of this size takes."""
    return -(-size // 128) * 128
