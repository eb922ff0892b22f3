"""The bodies of the Pallas-Triton kernels of paged attention, and what they share.

Plain block operations only: loads through page numbers, two products, an online softmax.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from kernels._compat import import_pallas_triton
from kernels.paged_attention.reference import MASKED

triton: Any = import_pallas_triton()
"""The lowering's own loads and stores; None where this jax has none."""

_LOG2_E = math.log2(math.e)
_MIN_SPLIT_BLOCKS = 2  # a split of fewer costs more to start and to merge than it saves


class Call(NamedTuple):
    """What a kernel is traced with.

    Attributes:
      block_keys, block_queries, num_splits: as the `Config` of `pallas_triton` says.
      group, scale, window, soft_cap: as for `kernels.paged_attention.attend`.
      group_size: G, query heads of a KV head.
      head_dim, page_size: of the cache.
      is_decode: whether every row is a decode.
    """

    block_keys: int
    block_queries: int
    num_splits: int
    group: int
    scale: float
    window: int | None
    soft_cap: float | None
    group_size: int
    head_dim: int
    page_size: int
    is_decode: bool

    def first_visible(self, position: Array) -> Array:
        """Returns the first key that the query at a position sees."""
        if self.window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - (self.window - 1), 0)

    def split(self, kv_len: Array, index: Array) -> tuple[Array, Array]:
        """Returns the blocks of keys, [begin, end), of some splits of a decode row; may be none.

        They follow from the row's own length: batchmates do not change a bit of its result.
        """
        begin = lax.div(self.first_visible(kv_len - 1), self.block_keys)
        end = lax.div(kv_len + (self.block_keys - 1), self.block_keys)
        share = lax.div(end - begin + (self.num_splits - 1), self.num_splits)
        share = jnp.maximum(share, _MIN_SPLIT_BLOCKS)
        begin = begin + index * share
        return begin, jnp.minimum(begin + share, end)

    def to_base_2(self, products: Array) -> Array:
        """Returns scores, scaled and capped, as exponents to base 2."""
        if self.soft_cap is None:
            return products * (self.scale * _LOG2_E)
        return jnp.tanh(products * (self.scale / self.soft_cap)) * (self.soft_cap * _LOG2_E)


class _Queries(NamedTuple):
    """Consecutive queries of one row, each with the G heads of one KV head: R rows of a block."""

    loaded: Array  # [R, H]
    position: Array  # [R]; -1 behind the last query
    token: Array  # [R]
    head: Array  # [R]
    is_live: Array  # [R]

    @classmethod
    def load(
        cls,
        call: Call,
        q_ref: Any,
        kv_head: Array,
        token: Array,
        position: Array,
        count: Array | int,
    ) -> _Queries:
        """Loads `count` queries from `token` on, the first of which sits at `position`."""
        row = _arange(num_block_rows(call.block_queries, call.group_size))
        query, head = lax.div(row, call.group_size), lax.rem(row, call.group_size)
        token, head, is_live = token + query, kv_head * call.group_size + head, query < count
        position = jnp.where(is_live, position + query, -1)
        return cls(_load_rows(q_ref, (token, head), is_live), position, token, head, is_live)


class _State(NamedTuple):
    """A softmax in progress, to base 2: the largest score, the sum of weights, weighted values."""

    peak: Array  # [R]
    total: Array  # [R]
    weighted: Array  # [R, H]


class _Cache(NamedTuple):
    """References to the page table and to one layer's cache."""

    page_table: Any  # [C, B, M]
    values: Any  # [P * page, 2 * K, H]
    scales: Any = None  # [P, K, 2, page]

    def attend(
        self,
        call: Call,
        queries: _Queries,
        row: Array,
        kv_head: Array,
        blocks: tuple[Array, Array],
        keys: tuple[Array, Array],
    ) -> _State:
        """Attends to those of a row's keys [first, end) that lie in the blocks [begin, end)."""
        dtype = product_dtype(queries.loaded.dtype, self.values.dtype)
        # The weights of codes carry the values' scale, for which float16 may be too narrow.
        is_narrow = self.scales is not None and dtype == jnp.float16
        value_dtype = jnp.dtype(jnp.bfloat16) if is_narrow else dtype
        loaded = queries.loaded.astype(dtype)

        def fold(block: Array, state: _State) -> _State:
            key = block * call.block_keys + _arange(call.block_keys)
            is_seen = (key >= keys[0]) & (key < keys[1])
            page, offset = lax.div(key, call.page_size), lax.rem(key, call.page_size)
            page = _load(self.page_table, (call.group, row, page), is_seen)
            slot = page * call.page_size + offset
            # Masked loads give zeros: what no query sees may be NaN, and 0 * NaN is NaN.
            block_keys = _load_rows(self.values, (slot, 2 * kv_head), is_seen).astype(dtype)
            scores = _dot(loaded, block_keys, 1)
            if self.scales is not None:
                scores *= _load(self.scales, (page, kv_head, 0, offset), is_seen)[None]
            visible = is_seen[None] & (key[None] <= queries.position[:, None])
            if call.window is not None:
                visible &= key[None] > queries.position[:, None] - call.window
            scores = jnp.where(visible, call.to_base_2(scores), MASKED)
            peak = jnp.maximum(state.peak, scores.max(1))
            weights = jnp.where(visible, jnp.exp2(scores - peak[:, None]), 0.0)
            decay = jnp.exp2(state.peak - peak)
            total = state.total * decay + weights.sum(1)
            if self.scales is not None:
                weights *= _load(self.scales, (page, kv_head, 1, offset), is_seen)[None]
            values = _load_rows(self.values, (slot, 2 * kv_head + 1), is_seen)
            weighted = _dot(weights.astype(value_dtype), values.astype(value_dtype), 0)
            return _State(peak, total, state.weighted * decay[:, None] + weighted)

        peak = jnp.full(queries.position.shape, MASKED, jnp.float32)
        state = _State(peak, jnp.zeros_like(peak), jnp.zeros(loaded.shape, jnp.float32))
        return lax.fori_loop(*blocks, fold, state)


def decode_kernel(
    q_ref: Any,  # [T, N, H]
    num_decodes_ref: Any,  # [1]
    kv_lens_ref: Any,  # [B]
    *refs: Any,  # _Cache; then what `_State` holds, [B, N, splits], the same, [B, N, splits, H]
    call: Call,
) -> None:
    """Attends one query with the G heads of a KV head to one split of its keys."""
    # Grid (K, B, splits).
    cache, (peak_ref, total_ref, weighted_ref) = _Cache(*refs[:-3]), refs[-3:]
    kv_head, row, split = (pl.program_id(axis) for axis in range(3))
    kv_len = jnp.where(row < num_decodes_ref[0], kv_lens_ref[row], 0)
    begin, end = call.split(kv_len, split)

    @pl.when(begin < end)
    def _attend_split() -> None:
        queries = _Queries.load(call, q_ref, kv_head, row, kv_len - 1, 1)
        keys = call.first_visible(kv_len - 1), kv_len
        state = cache.attend(call, queries, row, kv_head, (begin, end), keys)
        # Not `queries.head`, which repeats: an interpreted store also rewrites what is masked.
        head = kv_head * call.group_size + _arange(queries.head.shape[0])
        is_live, at = queries.is_live, (row, head, split)
        triton.store(peak_ref.at[at], state.peak, mask=is_live)
        triton.store(total_ref.at[at], state.total, mask=is_live)
        _store_rows(weighted_ref, at, state.weighted, is_live)


def merge_kernel(
    num_decodes_ref: Any,  # [1]
    kv_lens_ref: Any,  # [B]
    peak_ref: Any,  # [B, N, splits]
    total_ref: Any,  # [B, N, splits]
    weighted_ref: Any,  # [B, N, splits, H]
    *refs: Any,  # the result, [T, N, H]; unless every row is a decode, before it as input too
    call: Call,
) -> None:
    """Adds up one head's splits of a decode row; those that are none were never written."""
    # Grid (N, B).
    out_ref = refs[-1]
    head, row = pl.program_id(0), pl.program_id(1)
    is_decode = row < num_decodes_ref[0]
    split = _arange(call.num_splits)
    begin, end = call.split(jnp.where(is_decode, kv_lens_ref[row], 0), split)
    is_live, at = begin < end, (row, head, split)
    peak = triton.load(peak_ref.at[at], mask=is_live, other=MASKED)
    weight = jnp.where(is_live, jnp.exp2(peak - peak.max(0)), 0.0)
    total = (weight * _load(total_ref, at, is_live)).sum(0)
    weight /= jnp.where(total > 0, total, 1.0)

    @pl.when(is_decode | call.is_decode)
    def _store() -> None:
        weighted = _load_rows(weighted_ref, at, is_live)
        result = (weight[:, None] * weighted).sum(0).astype(out_ref.dtype)
        lane = _arange(result.shape[0])
        triton.store(out_ref.at[row, head, lane], result, mask=lane < call.head_dim)


def tile_kernel(
    q_ref: Any,  # [T, N, H]
    counts_ref: Any,  # [2]: num_decodes, num_seqs
    kv_lens_ref: Any,  # [B]
    cu_q_lens_ref: Any,  # [B + 1]
    *refs: Any,  # _Cache; then the result, [T, N, H], as input and as output
    call: Call,
) -> None:
    """Attends up to `block_queries` queries of a row that is no decode to all of its keys."""
    # Grid (K, tiles), the heaviest first. Row b's tiles begin at cu_q_lens[b] // length + b: that
    # leaves room for all of them, and some dead tiles between.
    cache, out_ref, length = _Cache(*refs[:-2]), refs[-1], call.block_queries
    kv_head, tile = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    num_rows = kv_lens_ref.shape[0]
    rows = _arange(pl.next_power_of_2(num_rows))
    starts = _load(cu_q_lens_ref, (rows,), rows < num_rows)
    is_before = (rows < num_rows) & (lax.div(starts, length) + rows <= tile)
    row = is_before.astype(jnp.int32).sum(0, dtype=jnp.int32) - 1
    row_begin, row_end, kv_len = cu_q_lens_ref[row], cu_q_lens_ref[row + 1], kv_lens_ref[row]
    token = row_begin + (tile - row - lax.div(row_begin, length)) * length
    count = jnp.minimum(length, row_end - token)

    @pl.when((row >= counts_ref[0]) & (row < counts_ref[1]) & (count > 0))
    def _attend_tile() -> None:
        position = kv_len - (row_end - token)  # of the first query
        queries = _Queries.load(call, q_ref, kv_head, token, position, count)
        keys = call.first_visible(position), position + count
        begin = lax.div(keys[0], call.block_keys)
        end = lax.div(keys[1] + (call.block_keys - 1), call.block_keys)
        state = cache.attend(call, queries, row, kv_head, (begin, end), keys)
        result = state.weighted / jnp.where(state.total > 0, state.total, 1.0)[:, None]
        at = queries.token, queries.head
        _store_rows(out_ref, at, result.astype(out_ref.dtype), queries.is_live)


def write_kernel(
    new_ref: Any,  # [T, 2 * K, H]
    slots_ref: Any,  # [T]
    *refs: Any,  # values [P * page, 2 * K, H] and scales [P, K, 2, page], as input and as output
    page_size: int,
) -> None:
    """Writes one token of the grid (T,) into its slot."""
    values_ref, *scales_refs = refs[len(refs) // 2 :]
    token, num_rows = pl.program_id(0), new_ref.shape[1]
    slot, row = slots_ref[token], _arange(pl.next_power_of_2(num_rows))
    is_row = row < num_rows
    new = _load_rows(new_ref, (token, row), is_row)
    for scales_ref in scales_refs:
        new, scale = _quantize(new)
        page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
        at = scales_ref.at[page, lax.div(row, 2), lax.rem(row, 2), offset]
        triton.store(at, scale, mask=is_row)
    _store_rows(values_ref, (slot, row), new.astype(values_ref.dtype), is_row)


def num_block_rows(num_queries: int, group_size: int) -> int:
    """Returns the rows of a block of queries: the tensor cores take 16 at least."""
    return max(16, pl.next_power_of_2(num_queries * group_size))


def product_dtype(query_dtype: Any, held_dtype: Any) -> Any:
    """Returns in which dtype queries and what a cache holds are multiplied, without rounding."""
    is_held = held_dtype in (query_dtype, jnp.int8)
    return jnp.dtype(query_dtype if is_held else jnp.float32)


def padded(head_dim: int) -> int:
    """Returns a head's elements in a block, of which the last may be masked.

    Two blocks, such as 64 + 16, would hold no more than there are. But 16 columns do not divide
    among four warps, so that each of them computed all scores: 168 registers, here 105 (sm_80).
    """
    return max(16, pl.next_power_of_2(head_dim))


def _quantize(values: Array) -> tuple[Array, Array]:
    """Returns the codes of keys and values `[R, H]` and a scale per row, as `quantize_kv` does."""
    values = values.astype(jnp.float32)
    scale = jnp.abs(values).max(1) / 127
    codes = _round(values / jnp.where(scale > 0, scale, 1.0)[:, None])
    return jnp.clip(codes, -127, 127), scale


def _round(x: Array) -> Array:
    """Rounds to nearest, ties to even, which the lowering has no operation for."""
    down = jnp.floor(x)
    rest, is_odd = x - down, down > 2 * jnp.floor(down / 2)
    return down + jnp.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)


def _arange(size: int) -> Array:
    return lax.iota(jnp.int32, size)


def _load(ref: Any, at: tuple[Any, ...], mask: Array) -> Array:
    return triton.load(ref.at[at], mask=mask, other=0)


def _load_rows(ref: Any, at: tuple[Any, ...], is_live: Array) -> Array:
    """Loads `[R, H]`, H filled up to a power of two; zeros there and in rows that are not live."""
    lane, mask = _lanes(ref.shape[-1], is_live)
    return _load(ref, (*map(_column, at), lane), mask)


def _store_rows(ref: Any, at: tuple[Any, ...], rows: Array, is_live: Array) -> None:
    lane, mask = _lanes(ref.shape[-1], is_live)
    triton.store(ref.at[(*map(_column, at), lane)], rows, mask=mask)


def _lanes(head_dim: int, is_live: Array) -> tuple[Array, Array]:
    """Returns the elements of a head as a row, and which of them exist in which rows."""
    lane, is_live = _arange(padded(head_dim))[None], is_live[:, None]
    return lane, is_live if lane.size == head_dim else is_live & (lane < head_dim)


def _column(index: Any) -> Any:
    return index[:, None] if jnp.ndim(index) else index


def _dot(a: Array, b: Array, contracted: int) -> Array:
    """Product over a's columns and the axis `contracted` of b; float32 sums of exact products."""
    return lax.dot_general(
        a,
        b,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
