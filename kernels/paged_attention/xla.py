"""Paged attention in plain XLA, on any backend: online softmax over blocks of keys.

Trip counts are traced, so the cost follows the live keys and never the width of the page table.
Tuned on CPU: few, large operations in a loop's body, and what they touch stays in its cache.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int, Int32, Real

from kernels.paged_attention.cache import (
    KVCache,
    KVValues,
    QuantizedKV,
    decode,
    encode_rows,
    held_by,
    holding,
    kv_dims,
    quantize_kv,
    read_pages,
    write_scales,
)
from kernels.paged_attention.metadata import AttentionMetadata
from kernels.paged_attention.reference import MASKED, supports

__all__ = ["attend", "supports", "write"]

_BLOCK_KEYS = 128
_BLOCK_QUERIES = 64


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Scatters rows of whole tokens; see `kernels.paged_attention.write`."""
    page_size = kv_dims(kv).page_size
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if isinstance(kv, QuantizedKV):
        codes, scales = quantize_kv(new_kv)
        values = _scatter(kv.values, page, offset, codes)
        return QuantizedKV(values, write_scales(kv.scales, scales, page, offset))
    return _scatter(kv, page, offset, new_kv)


def _scatter(
    values: KVValues, page: Int[Array, "T"], offset: Int[Array, "T"], rows: Real[Array, "T K 2 H"]
) -> KVValues:
    place = held_by(values).at[page, offset]
    return holding(place.set(encode_rows(rows, values), mode="promise_in_bounds"), values)


def attend(
    q: Float[Array, "T N H"],
    kv: KVCache,
    metadata: AttentionMetadata,
    *,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attends decode rows one by one, other rows in tiles; see `kernels.paged_attention`."""
    num_kv_heads, head_dim = kv_dims(kv)[2:]
    queries = q.astype(jnp.float32).reshape(q.shape[0], num_kv_heads, -1, head_dim) * scale
    layer = _Layer(kv, metadata.page_table[group], window, soft_cap)
    out = _attend_decodes(queries, metadata, layer)
    if not metadata.is_decode:
        out = _attend_tiles(queries, out, metadata, layer)
    return out.reshape(q.shape).astype(q.dtype)


def _attend_decodes(
    queries: Float32[Array, "T K G H"], metadata: AttentionMetadata, layer: _Layer
) -> Float32[Array, "T K G H"]:
    """Returns the result of the rows with one query each, zeros elsewhere.

    Row by row on CPU, where a batch would make all rows pay for the longest and gains nothing.
    """
    num_rows = min(metadata.kv_lens.shape[0], queries.shape[0])
    num_decodes = metadata.num_seqs if metadata.is_decode else metadata.num_decodes

    def attend_row(row: Array) -> Array:
        position = metadata.kv_lens[row, None] - 1
        return layer.attend(lax.dynamic_slice_in_dim(queries, row, 1), row, position)

    def one_by_one() -> Array:
        def attend_next(row: Array, out: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(out, attend_row(row), row, 0)

        return lax.fori_loop(0, num_decodes, attend_next, jnp.zeros_like(queries))

    def as_batch() -> Array:
        row = jnp.arange(num_rows, dtype=jnp.int32)
        attended = jax.vmap(attend_row)(row)[:, 0]
        attended = jnp.where((row < num_decodes)[:, None, None, None], attended, 0.0)
        return jnp.zeros_like(queries).at[:num_rows].set(attended)

    return lax.platform_dependent(cpu=one_by_one, default=as_batch)


def _attend_tiles(
    queries: Float32[Array, "T K G H"],
    out: Float32[Array, "T K G H"],
    metadata: AttentionMetadata,
    layer: _Layer,
) -> Float32[Array, "T K G H"]:
    """Fills in the rows past `num_decodes`, tile by tile of consecutive queries of one row."""
    cu_q_lens, kv_lens = metadata.cu_q_lens, metadata.kv_lens
    num_tokens = queries.shape[0]
    length = min(_BLOCK_QUERIES, num_tokens)
    tile_row, tile_begin, num_tiles = metadata.query_tiles(num_tokens, length)

    def attend_tile(tile: Array, out: Array) -> Array:
        row, begin = tile_row[tile], tile_begin[tile]
        row_end = cu_q_lens[row + 1]
        # A slice must end inside the array, so it may begin before the tile does.
        start = jnp.minimum(begin, num_tokens - length)
        token = start + jnp.arange(length, dtype=jnp.int32)
        mine = jnp.clip(token, begin, row_end - 1)
        position = mine - row_end + kv_lens[row]
        attended = layer.attend(lax.dynamic_slice_in_dim(queries, start, length), row, position)
        others = lax.dynamic_slice_in_dim(out, start, length)
        update = jnp.where((token == mine)[:, None, None, None], attended, others)
        return lax.dynamic_update_slice_in_dim(out, update, start, 0)

    return lax.fori_loop(0, num_tiles, attend_tile, out)


class _Layer(NamedTuple):
    """One layer's cache and how queries look at it."""

    kv: KVCache
    page_table: Array  # [B, M]
    window: int | None
    soft_cap: float | None

    def attend(
        self, queries: Float32[Array, "Q K G H"], row: Int[Array, ""], position: Int32[Array, "Q"]
    ) -> Float32[Array, "Q K G H"]:
        """Attends queries of one row, at ascending positions; a position of -1 gives zeros."""
        num_queries, num_kv_heads, group_size, head_dim = queries.shape
        page_size = kv_dims(self.kv).page_size
        pages_per_block = max(1, _BLOCK_KEYS // page_size)
        size = pages_per_block * page_size
        queries = jnp.swapaxes(queries, 0, 1).reshape(num_kv_heads, -1, head_dim)
        first_key, keys_end = self._first_visible(position[0]), position[-1] + 1
        position = jnp.repeat(position, group_size)[:, None]

        def fold_block(block: Array, state: _Softmax) -> _Softmax:
            page = block * pages_per_block + jnp.arange(pages_per_block, dtype=jnp.int32)
            page = self.page_table[row, jnp.minimum(page, self.page_table.shape[1] - 1)]
            key = block * size + jnp.arange(size, dtype=jnp.int32)
            keys_and_values = self._read(page, (key >= first_key) & (key < keys_end))
            visible = key[None, :] <= position
            if self.window is not None:
                visible &= key[None, :] >= self._first_visible(position)
            return state.fold(queries, keys_and_values, visible[None], self.soft_cap)

        blocks_end = (keys_end + size - 1) // size
        state = _Softmax.empty(queries)
        state = lax.fori_loop(first_key // size, blocks_end, fold_block, state)
        attended = state.result().reshape(num_kv_heads, num_queries, group_size, head_dim)
        return jnp.swapaxes(attended, 0, 1)

    def _first_visible(self, position: Int32[Array, "*dims"]) -> Int32[Array, "*dims"]:
        if self.window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - (self.window - 1), 0)

    def _read(self, page: Int32[Array, "M"], is_seen: Bool[Array, "S"]) -> _Block:
        """Reads some pages; what no query sees of them may be NaN, and only the keys stay so."""
        # 0 * NaN is NaN: masked scores do not save the sum over the values.
        if isinstance(self.kv, QuantizedKV):
            scales = self.kv.scales.at[page].get(mode="promise_in_bounds")
            scales = scales[..., : kv_dims(self.kv).page_size]  # [M, K, 2, page]
            key_scales, value_scales = (
                jnp.swapaxes(scales[:, :, half], 0, 1).reshape(scales.shape[1], -1)
                for half in range(2)
            )
            keys, values = (_gather(self.kv.values, page, half) for half in range(2))
            return _Block(keys, values, key_scales, jnp.where(is_seen[None], value_scales, 0.0))
        keys, values = (_gather(self.kv, page, half) for half in range(2))
        return _Block(keys, jnp.where(is_seen[None, :, None], values, 0.0))


class _Block(NamedTuple):
    """Keys and values of some pages; of a quantized cache their codes, and the scales."""

    keys: Float32[Array, "K S H"]
    values: Float32[Array, "K S H"]
    key_scales: Float32[Array, "K S"] | None = None
    value_scales: Float32[Array, "K S"] | None = None


def _gather(values: KVValues, page: Int32[Array, "M"], half: int) -> Float32[Array, "K S H"]:
    """Reads the keys (half 0) or the values (half 1) of some pages, as one gather."""
    block = read_pages(values, page, half)
    return decode(jnp.swapaxes(block.reshape(-1, *block.shape[2:]), 0, 1))


class _Softmax(NamedTuple):
    """A softmax in progress: the largest score, the sum of weights, the weighted values."""

    peak: Array  # [K, Q]
    total: Array  # [K, Q]
    weighted: Array  # [K, Q, H]

    @classmethod
    def empty(cls, queries: Float32[Array, "K Q H"]) -> _Softmax:
        """Returns the state before any key; made like the queries, it varies over their mesh."""
        total = jnp.zeros_like(queries[..., 0])
        return cls(jnp.full_like(total, MASKED), total, jnp.zeros_like(queries))

    def fold(
        self,
        queries: Float32[Array, "K Q H"],
        block: _Block,
        visible: Bool[Array, "1 Q S"],
        soft_cap: float | None,
    ) -> _Softmax:
        """Returns the state after one more block of keys."""
        scores = jnp.einsum("KQH,KSH->KQS", queries, block.keys, precision="highest")
        if block.key_scales is not None:
            scores *= block.key_scales[:, None, :]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible, scores, MASKED)
        peak = jnp.maximum(self.peak, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - peak[..., None]), 0.0)
        decay = jnp.exp(self.peak - peak)
        total = self.total * decay + weights.sum(-1)
        if block.value_scales is not None:
            weights *= block.value_scales[:, None, :]
        weighted = jnp.einsum("KQS,KSH->KQH", weights, block.values, precision="highest")
        return _Softmax(peak, total, self.weighted * decay[..., None] + weighted)

    def result(self) -> Float32[Array, "K Q H"]:
        """Returns the weighted mean of the values; zeros for a query that saw nothing."""
        return self.weighted / jnp.where(self.total > 0, self.total, 1.0)[..., None]
