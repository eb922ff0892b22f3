"""Mosaic GPU attention of tiles: consecutive queries of one row, each with heads of one KV head.

Queries times heads are wgmma's rows, 64 to a warpgroup: `S = Q K'`, softmax along the rows,
`O = P V`. One warpgroup fetches keys and values, several compute over them; of an int8 cache
one more decodes, since wgmma's right operand must lie in shared memory in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import device
from kernels._compat import load_as, store_as_is, transpose_ref
from kernels.paged_attention import mosaic_gpu_pages as shared
from kernels.paged_attention.cache import KVCache
from kernels.paged_attention.mosaic_gpu_pages import (
    MASKED,
    OF_COLUMNS,
    OF_ROWS,
    WGMMA,
    Blocks,
    Fetch,
    Ref,
)

_ROWS = 64  # of wgmma


class _Tile(NamedTuple):
    """A thread block's tile: the queries `[token, row_end)` of a row, as many as fit."""

    row: Array
    head: Array  # of the blocks of heads
    token: Array
    row_end: Array
    position: Array  # of the first query
    kv_len: Array
    first: Array  # key that a query of the tile sees
    begin: Array  # blocks of keys
    end: Array


@dataclass(frozen=True)
class TileKernel:
    """The kernel for one shape of call.

    Attributes:
      blocks: how keys reach shared memory.
      heads: query heads of a tile, at most 64; all of one KV head.
      blocks_per_kv_head: tiles of the same queries that share a KV head.
      warpgroups: that compute, each 64 // heads queries of the tile.
      decoded: blocks of decoded keys and values in shared memory, of an int8 cache.
      scale, window, soft_cap: as of `attend`.
    """

    blocks: Blocks
    heads: int
    blocks_per_kv_head: int
    warpgroups: int
    decoded: int
    scale: float
    window: int | None
    soft_cap: float | None

    @property
    def num_queries(self) -> int:
        """Queries of one warpgroup."""
        return _ROWS // self.heads

    @property
    def tile_queries(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * self.num_queries

    def __call__(
        self,
        q: Array,
        kv: KVCache,
        tile_row: Array,
        tile_token: Array,
        kv_lens: Array,
        cu_q_lens: Array,
        table: Array,
    ) -> Array:
        """Returns the attention `[T, N, H]` of the tiles' tokens; others hold anything.

        Args:
          q: `[T, N, H]`.
          kv: the layer's cache.
          tile_row, tile_token: row and first token of each tile; past its row for no tile.
          kv_lens, cu_q_lens, table: as of the metadata.
        """
        num_heads = q.shape[1] // self.heads
        num_threads = 1 + self.warpgroups + self.blocks.is_int8

        def body(*refs: Ref, **scratch: Ref) -> None:
            q_ref, *cache, rows, tokens, lens, starts, pages, out = refs
            warpgroup = lax.axis_index("warpgroup")
            place = lax.axis_index("tile"), lax.axis_index("head")
            tile = self._tile(place, rows, tokens, lens, starts)

            @pl.when(warpgroup < self.warpgroups)
            def _compute() -> None:
                self._attend(tile, warpgroup, q_ref, out, scratch)

            @pl.when(warpgroup == self.warpgroups)
            def _fetch() -> None:
                plgpu.set_max_registers(40, action="decrease")
                kv_head = lax.div(tile.head, jnp.int32(self.blocks_per_kv_head))
                fetch = Fetch(self.blocks, cache, pages, scratch, tile.row, kv_head)
                fetch(tile.begin, tile.end)

            if self.blocks.is_int8:

                @pl.when(warpgroup == self.warpgroups + 1)
                def _decode() -> None:
                    plgpu.set_max_registers(104, action="decrease")
                    self._decode(tile, scratch)

        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
            scratch_types=self._scratch(),
            grid=(tile_row.shape[0], num_heads),
            grid_names=("tile", "head"),
            num_threads=num_threads,
            thread_name="warpgroup",
            interpret=device.interpret_mode(),
            compiler_params=shared.compiler_params(),
        )(q, *self.blocks.views(kv), tile_row, tile_token, kv_lens, cu_q_lens, table)

    def _scratch(self) -> dict[str, Any]:
        blocks, warpgroups = self.blocks, self.warpgroups
        rows = (warpgroups, _ROWS, blocks.head_dim)
        scratch = blocks.scratch() | {
            "queries": shared.matrix(rows, blocks.dtype, blocks.swizzle),
            "staged": plgpu.SMEM(rows, blocks.dtype),
            "queries_here": plgpu.Barrier(
                num_arrivals=1 if self.heads == 1 else self.num_queries, num_barriers=warpgroups
            ),
            "clean": plgpu.Barrier(num_arrivals=warpgroups),
        }
        if not blocks.is_int8:
            consumers = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=blocks.stages)
            return scratch | {"consumed": consumers}
        shape = (self.decoded, blocks.block_keys)
        return scratch | {
            "consumed": plgpu.Barrier(num_barriers=blocks.stages),
            "decoded_keys": shared.matrix((*shape, blocks.head_dim), blocks.dtype, blocks.swizzle),
            "decoded_values": shared.matrix(
                (*shape, blocks.head_dim), blocks.value_dtype, blocks.swizzle
            ),
            "decoded_key_scales": plgpu.SMEM(shape, jnp.float32),
            "decoded_value_scales": plgpu.SMEM(shape, jnp.float32),
            "decoded": plgpu.Barrier(num_barriers=self.decoded),
            "decoded_consumed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=self.decoded),
        }

    def _tile(
        self, place: tuple[Array, Array], rows: Ref, tokens: Ref, kv_lens: Ref, starts: Ref
    ) -> _Tile:
        index, head = place
        row, token = rows[index], tokens[index]
        row_end, kv_len, size = starts[row + 1], kv_lens[row], self.blocks.block_keys
        position = kv_len - (row_end - token)
        first = jnp.int32(0)
        if self.window is not None:
            first = jnp.maximum(position - (self.window - 1), 0)
        keys_end = jnp.minimum(position + self.tile_queries, kv_len)
        begin = lax.div(first, jnp.int32(size))
        end = lax.div(keys_end + (size - 1), jnp.int32(size))
        end = jnp.where(token < row_end, jnp.maximum(end, begin), begin)
        return _Tile(row, head, token, row_end, position, kv_len, first, begin, end)

    def _decode(self, tile: _Tile, scratch: dict[str, Ref]) -> None:
        """Turns blocks of codes into blocks of floats; their scales go along."""
        blocks = self.blocks

        @pl.loop(0, tile.end - tile.begin)
        def _next(i: Array) -> None:
            slot, there = lax.rem(i, jnp.int32(blocks.stages)), lax.rem(i, jnp.int32(self.decoded))

            @pl.when(i >= self.decoded)
            def _wait() -> None:
                plgpu.barrier_wait(scratch["decoded_consumed"].at[there])

            plgpu.barrier_wait(scratch["full"].at[slot])
            halves = blocks.halves(scratch, slot)
            for codes, name in zip(halves, ("decoded_keys", "decoded_values"), strict=True):
                shared.decode(codes, scratch[name].at[there])
            for name in ("key_scales", "value_scales"):
                scales = load_as(scratch[name].at[slot], OF_COLUMNS)
                scratch[f"decoded_{name}"].at[there][...] = scales
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["consumed"].at[slot])
            plgpu.barrier_arrive(scratch["decoded"].at[there])

    def _attend(
        self, tile: _Tile, warpgroup: Array, q: Ref, out: Ref, scratch: dict[str, Ref]
    ) -> None:
        blocks, is_int8 = self.blocks, self.blocks.is_int8
        plgpu.set_max_registers(self._registers(), action="increase")
        token = tile.token + warpgroup * self.num_queries
        self._load_queries(tile, token, warpgroup, q, scratch)
        query = lax.div(
            plgpu.broadcasted_iota(jnp.int32, (_ROWS, blocks.block_keys), 0, layout=WGMMA),
            jnp.int32(self.heads),
        )
        position = tile.position + warpgroup * self.num_queries + query
        full, consumed = ("decoded", "decoded_consumed") if is_int8 else ("full", "consumed")

        def fold(i: Array, state: _State) -> _State:
            slot = lax.rem(i, jnp.int32(self.decoded if is_int8 else blocks.stages))
            plgpu.barrier_wait(scratch[full].at[slot])
            key = (tile.begin + i) * blocks.block_keys
            state = self._fold(tile, warpgroup, slot, key, position, scratch, state)
            plgpu.barrier_arrive(scratch[consumed].at[slot])
            return state

        state = _State(
            shared.filled((_ROWS,), MASKED, OF_ROWS),
            shared.filled((_ROWS,), 0.0, OF_ROWS),
            tuple(shared.filled((_ROWS, part.size), 0.0, WGMMA) for part in self._parts()),
        )
        state = lax.fori_loop(0, tile.end - tile.begin, fold, state)
        self._store(tile, token, warpgroup, state, out, scratch)

    def _registers(self) -> int:
        """Returns the registers of a thread that computes: what the other warpgroups leave."""
        if self.warpgroups == 1:
            return 240
        return 184 if self.blocks.is_int8 else 232

    def _parts(self) -> list[Any]:
        """Returns slices of the values' columns, whose sums are in registers one at a time."""
        head_dim = self.blocks.head_dim
        width = min(head_dim, 128)
        return [pl.ds(begin, width) for begin in range(0, head_dim, width)]

    def _load_queries(
        self, tile: _Tile, token: Array, warpgroup: Array, q: Ref, scratch: dict[str, Ref]
    ) -> None:
        """Loads a warpgroup's queries; shared memory has them in two layouts in turn.

        TMA writes a query's heads as rows, but only 8 rows at a time as wgmma reads them.
        """
        staged, here = scratch["staged"].at[warpgroup], scratch["queries_here"].at[warpgroup]
        if self.heads == 1:
            source = q.at[pl.ds(token, self.num_queries), tile.head]
            plgpu.copy_gmem_to_smem(source, staged, here)
        else:

            def load(warp: Array) -> None:
                for i in range(self.num_queries):
                    source, rows = self._query(q, tile, token + i), self._rows(staged, i)
                    pl.when(warp == i % 4)(partial(plgpu.copy_gmem_to_smem, source, rows, here))

            plgpu.warp_map(load)
        plgpu.barrier_wait(here)
        for part in self._parts():
            # Rows as TMA writes them: loads conflict, but once in a tile.
            held = load_as(staged.at[:, part], WGMMA, optimized=False)
            scratch["queries"].at[warpgroup, :, part][...] = held
        plgpu.commit_smem()

    def _query(self, array: Ref, tile: _Tile, token: Array) -> Ref:
        """Returns one query's, or result's, `[heads, H]` in device memory."""
        return array.at[token, pl.ds(tile.head * self.heads, self.heads)]

    def _rows(self, staged: Ref, i: Any) -> Ref:
        """Returns the rows of a warpgroup's query."""
        return staged.at[pl.ds(i * self.heads, self.heads)]

    def _fold(
        self,
        tile: _Tile,
        warpgroup: Array,
        slot: Array,
        key: Array,
        position: Array,
        scratch: dict[str, Ref],
        state: _State,
    ) -> _State:
        """Folds the block of keys that begins with `key` into a softmax in progress."""
        blocks = self.blocks
        shape = (_ROWS, blocks.block_keys)
        if blocks.is_int8:
            keys, values = (scratch[f"decoded_{half}"].at[slot] for half in ("keys", "values"))
        else:
            keys, values = blocks.halves(scratch, slot)
        queries = scratch["queries"].at[warpgroup]
        scores = shared.multiply(shape, queries, transpose_ref(keys))
        if blocks.is_int8:
            scales = load_as(scratch["decoded_key_scales"].at[slot], OF_COLUMNS)
            scores *= shared.columns(scales, shape)
        scores = shared.scores_of(scores, self.scale, self.soft_cap)
        key_of = key + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        is_seen = key_of <= position
        if self.window is not None:
            is_seen &= key_of > position - self.window
        scores = jnp.where(is_seen, scores, MASKED)

        peak = jnp.maximum(state.peak, scores.max(axis=1))
        weights = jnp.exp2(scores - shared.rows(peak, shape))
        weights = jnp.where(is_seen, weights, 0.0)
        decay = jnp.exp2(state.peak - peak)
        total = state.total * decay + weights.sum(axis=1)
        if blocks.is_int8:
            scales = load_as(scratch["decoded_value_scales"].at[slot], OF_COLUMNS)
            weights = jnp.where(is_seen, weights * shared.columns(scales, shape), 0.0)
        else:
            self._zero_unseen(tile, warpgroup, key, values, scratch)
        weights = weights.astype(blocks.value_dtype)
        weighted = []
        for part, before in zip(self._parts(), state.weighted, strict=True):
            before *= shared.rows(decay, before.shape)
            weighted.append(shared.accumulate(before, weights, values.at[:, part]))
        return _State(peak, total, tuple(weighted))

    def _zero_unseen(
        self, tile: _Tile, warpgroup: Array, key: Array, values: Ref, scratch: dict[str, Ref]
    ) -> None:
        """Zeroes values that no query sees: one warpgroup does, and all wait for it."""

        @pl.when((key < tile.first) | (key + self.blocks.block_keys > tile.kv_len))
        def _block_has_some() -> None:
            @pl.when(warpgroup == 0)
            def _zero() -> None:
                shared.zero_rows(
                    values, lambda i: (key + i >= tile.first) & (key + i < tile.kv_len)
                )
                plgpu.commit_smem()

            plgpu.barrier_arrive(scratch["clean"])
            plgpu.barrier_wait(scratch["clean"])

    def _store(
        self,
        tile: _Tile,
        token: Array,
        warpgroup: Array,
        state: _State,
        out: Ref,
        scratch: dict[str, Ref],
    ) -> None:
        """Writes the results of queries that the row has."""
        staged, size = scratch["staged"].at[warpgroup], self.num_queries
        total = jnp.where(state.total > 0.0, state.total, 1.0)
        for part, weighted in zip(self._parts(), state.weighted, strict=True):
            result = weighted / shared.rows(total, weighted.shape)
            store_as_is(staged.at[:, part], result.astype(self.blocks.dtype))
        plgpu.commit_smem()
        count = jnp.clip(tile.row_end - token, 0, size)
        if self.heads == 1:

            @pl.when(count == size)
            def _store_all() -> None:
                plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(token, size), tile.head])

            count = jnp.where(count == size, 0, count)

        @pl.loop(0, count)
        def _store_one(i: Array) -> None:
            plgpu.copy_smem_to_gmem(self._rows(staged, i), self._query(out, tile, token + i))

        plgpu.wait_smem_to_gmem(0)


class _State(NamedTuple):
    """A softmax in progress: the largest score, the sum of weights, weighted values by parts."""

    peak: Array
    total: Array
    weighted: tuple[Array, ...]
