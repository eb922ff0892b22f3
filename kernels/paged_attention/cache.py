"""One layer's paged key/value cache: what holds it, how it is laid out, what its elements mean."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Int8, Real

from kernels.paged_attention.metadata import Leaf
from kernels.paged_attention.tpu_layout import (
    LANES,
    WORD_DTYPES,
    WordsKV,
    element_dtype,
    pack_rows,
    row_layout,
    unpack_rows,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKV:
    """A cache of 8-bit codes; a pytree. The value of an element is its scale times its code.

    All elements of one token, head and half share a scale. So key scales may multiply the scores,
    and value scales the probabilities. A scale that was never written may be NaN.

    Attributes:
      values: int8 codes of -127 to 127, held as other caches hold their values.
      scales: float32 `[P, K, 2, page]`; tokens last, so that a page's scales of a head are a row
        (on TPU of whole lanes: the last axis is a multiple of 128).
    """

    values: Leaf
    scales: Leaf


KVValues: TypeAlias = Array | WordsKV
KVCache: TypeAlias = KVValues | QuantizedKV
KVStruct: TypeAlias = jax.ShapeDtypeStruct | WordsKV | QuantizedKV


class KVDims(NamedTuple):
    """Sizes of one layer's cache, however it is laid out."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


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
    num_shards: int = 1,
) -> KVStruct:
    """Returns what to allocate for one layer's cache of `dtype` values; int8 comes with scales.

    Values are `[P, page, K, 2, H]`, keys at 0 and values at 1; on TPU a `WordsKV`. The page axis
    comes first, so that a page is one contiguous read of all its heads. Use `kv_dims`,
    `read_pages` and `encode_rows` to not care.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      num_kv_heads: of all devices together.
      num_shards: devices that the heads are split over.

    Raises:
      ValueError: a TPU has no cache of this dtype.
    """
    shape = (num_pages, page_size, num_kv_heads, 2, head_dim)
    dtype, lanes = kv_dtype(platform, dtype), page_size
    values: jax.ShapeDtypeStruct | WordsKV = jax.ShapeDtypeStruct(shape, dtype)
    if platform == "tpu":
        if dtype.name not in WORD_DTYPES:
            raise ValueError(f"a TPU has no cache of {dtype}: pass one of {[*WORD_DTYPES]}")
        local_heads = num_kv_heads // num_shards
        num_rows = num_shards * row_layout(local_heads, head_dim, dtype).num_rows
        words = (num_pages, page_size, num_rows, 1, LANES)
        held_as = jnp.dtype(WORD_DTYPES[dtype.name])
        values = WordsKV(jax.ShapeDtypeStruct(words, held_as), local_heads, head_dim)
        lanes = -(-page_size // LANES) * LANES
    if dtype != jnp.int8:
        return values
    scales = jax.ShapeDtypeStruct((num_pages, num_kv_heads, 2, lanes), jnp.float32)
    return QuantizedKV(values, scales)


def kv_partition(kv: KVCache | KVStruct, axis: str) -> PartitionSpec | WordsKV | QuantizedKV:
    """Returns the PartitionSpecs of a cache, in its structure, with its heads over a mesh axis."""
    values = values_of(kv)
    spec: PartitionSpec | WordsKV = PartitionSpec(None, None, axis)
    if isinstance(values, WordsKV):
        spec = WordsKV(spec, values.num_kv_heads, values.head_dim)
    return QuantizedKV(spec, PartitionSpec(None, axis)) if isinstance(kv, QuantizedKV) else spec


def kv_dims(kv: KVCache | KVStruct) -> KVDims:
    """Returns the sizes of a cache, however it is held; over a mesh, of one device's share."""
    values = values_of(kv)
    if isinstance(values, WordsKV):
        num_pages, page_size = values.words.shape[:2]
        return KVDims(num_pages, page_size, values.num_kv_heads, values.head_dim)
    num_pages, page_size, num_kv_heads, _, head_dim = values.shape
    return KVDims(num_pages, page_size, num_kv_heads, head_dim)


def values_of(kv: Any) -> Any:
    """Returns what holds a cache's values or, of a quantized one, its codes."""
    return kv.values if isinstance(kv, QuantizedKV) else kv


def held_by(values: Any) -> Any:
    """Returns the array (of structs: the struct) `[P, page, ...]` that holds a cache's values."""
    return values.words if isinstance(values, WordsKV) else values


def holding(held: Real[Array, "P page *rows"], like: Any) -> KVValues:
    """Returns values that an array holds in the way `like` does."""
    return dataclasses.replace(like, words=held) if isinstance(like, WordsKV) else held


def read_pages(
    values: KVValues, pages: Int[Array, "*pages"], half: int | None = None
) -> Real[Array, "..."]:
    """Returns the elements of some pages as `[*pages, page, K, 2, H]`, not decoded.

    Args:
      values: of a cache.
      pages: which; all must be inside the cache.
      half: 0 for keys or 1 for values alone, `[*pages, page, K, H]`; None for both.
    """
    if not isinstance(values, WordsKV):
        held = values.at[pages] if half is None else values.at[pages, :, :, half]
        return held.get(mode="promise_in_bounds")
    words = values.words.at[pages].get(mode="promise_in_bounds")
    rows = unpack_rows(words[..., 0, :], values.num_kv_heads, values.head_dim)
    return rows if half is None else rows[..., half, :]


def encode_rows(values: Real[Array, "T K 2 H"], like: Any) -> Real[Array, "T *rows"]:
    """Returns rows (of a quantized cache: codes) as a cache's values hold them."""
    if not isinstance(like, WordsKV):
        return encode(values, like.dtype)
    return pack_rows(values.astype(element_dtype(like.words.dtype)))[:, :, None]


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


def write_scales(
    scales: Float32[Array, "P K 2 lanes"],
    new_scales: Float32[Array, "T K 2"],
    page: Int[Array, "T"],
    offset: Int[Array, "T"],
) -> Float32[Array, "P K 2 lanes"]:
    """Scatters the scales of whole tokens to their pages and their offsets in them.

    Every axis has an index: a scatter over slices of an inner axis is one for which XLA:TPU
    changes the layout of all scales and back: 16 times their size (v6e, pages of 128).
    """
    head = jnp.arange(scales.shape[1], dtype=jnp.int32)[:, None]
    half = jnp.arange(2, dtype=jnp.int32)
    place = scales.at[page[:, None, None], head, half, offset[:, None, None]]
    return place.set(new_scales, mode="promise_in_bounds")


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
