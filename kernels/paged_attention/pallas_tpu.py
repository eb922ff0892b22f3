"""Paged attention on TPU: a kernel for rows of one query and one for tiles of a row's queries.

Both stream pages as `tpu_pages` says, with all heads of a page in one copy, and keep a softmax in
progress in VMEM. `tpu_layout` says how heads lie in a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from kernels import device, tuning
from kernels.paged_attention import tpu_kernels, tpu_pages
from kernels.paged_attention.cache import KVCache, KVStruct, QuantizedKV, values_of
from kernels.paged_attention.metadata import AttentionMetadata
from kernels.paged_attention.tpu_layout import LANES, RowLayout, WordsKV
from kernels.paged_attention.tpu_write import write

__all__ = ["Config", "attend", "supports", "write"]

_BLOCK_BYTES = 1024 * 1024
_TILE_ROWS = 256
_TILE_KEYS = 256
_VMEM_BYTES = 48 * 1024 * 1024


@dataclass(frozen=True)
class Config:
    """Block sizes of both kernels.

    Attributes:
      pages_per_block: pages that decode computes on at once, a power of two up to 128.
      tile_pages_per_block: the same for tiles.
      num_buffers: blocks in VMEM, all but one of them on their way.
      rows_per_step: decode rows whose queries and results are in VMEM at once.
      queries_per_tile: queries of a tile.
    """

    pages_per_block: int
    tile_pages_per_block: int
    num_buffers: int
    rows_per_step: int
    queries_per_tile: int

    @classmethod
    def for_call(
        cls, layout: RowLayout, page_size: int, num_heads: int, num_tokens: int, max_pages: int
    ) -> Config:
        """Returns blocks of a MiB, but of 128 to 1024 keys, and tiles of 256 rows of a unit."""
        token_bytes = layout.num_rows * LANES * 4
        keys = min(max(_BLOCK_BYTES // token_bytes, LANES), 1024)

        def pages(keys: int) -> int:
            most = min(keys // page_size, max_pages, tpu_pages.TABLE_CHUNK)
            return 1 << (max(most, 1).bit_length() - 1)

        group_size = num_heads // layout.num_kv_heads
        queries = min(_TILE_ROWS // (group_size * layout.row_heads), num_tokens + 7)
        queries = max(queries // 8 * 8, 8)
        return cls(pages(keys), pages(min(keys, _TILE_KEYS)), 4, 32, queries)


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses elements that a TPU cannot load."""
    values = values_of(kv)
    if not isinstance(values, WordsKV):
        raise NotImplementedError(
            f"a cache of {values.dtype} {values.shape} is not laid out for a TPU: make it by "
            f"kv_structs('tpu', ...) of float32, bfloat16 or int8"
        )
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"queries of {q.dtype}: a TPU has float32 and bfloat16")


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
    """Attends rows of one query, then tiles of the others; see `kernels.paged_attention`."""
    call = _Call.make(q, kv, metadata, group, scale, window, soft_cap)
    num_decodes = metadata.num_seqs if metadata.is_decode else metadata.num_decodes
    num_rows = min(metadata.kv_lens.shape[0], q.shape[0])
    work = _decode_work(metadata.kv_lens[:num_rows], num_decodes, call.shared)
    decoded = call.run(tpu_kernels.decode, q[:num_rows], work, (), call.config.rows_per_step, 1)
    if metadata.is_decode:
        return decoded
    length = call.config.queries_per_tile
    work, tiles = _tile_work(metadata, q.shape[0], length, call.shared)
    out = call.run(tpu_kernels.ragged, q, work, tiles, 1, length)
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < num_decodes
    first = jnp.where(is_decode[:, None, None], decoded, out[:num_rows])
    return out.at[:num_rows].set(first)


def _decode_work(kv_lens: Array, num_decodes: Array, shared: tpu_kernels.Shared) -> tpu_pages.Work:
    window = shared.window
    first = jnp.zeros_like(kv_lens) if window is None else jnp.maximum(kv_lens - window, 0)
    row = jnp.arange(kv_lens.size, dtype=jnp.int32)
    return tpu_pages.Work.make(row, first, kv_lens, num_decodes, shared.page_size)


def _tile_work(
    metadata: AttentionMetadata, num_tokens: int, length: int, shared: tpu_kernels.Shared
) -> tuple[tpu_pages.Work, tuple[Array, ...]]:
    """Returns a work for each pair of a tile of tokens and a row in it, in their order.

    And what the kernel needs beside: each tile's first work and their end `[tiles + 1]`, and of
    each work the position that the tile's first token would have in its row, and which of the
    tile's tokens are the row's, begin and end. XLA makes all this once for all layers.
    """
    cu_q_lens, kv_lens = metadata.cu_q_lens, metadata.kv_lens
    num_rows, num_tiles = kv_lens.shape[0], -(-num_tokens // length)
    begins, ends = cu_q_lens[:-1], cu_q_lens[1:]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_tiled = (row >= metadata.num_decodes) & (row < metadata.num_seqs) & (ends > begins)
    counts = jnp.where(is_tiled, (ends - 1) // length - begins // length + 1, 0)
    counts_end = jnp.cumsum(counts)
    index = jnp.arange(num_tiles + num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(counts_end, index, side="right", method="compare_all")
    row = jnp.minimum(row.astype(jnp.int32), num_rows - 1)
    tile = begins[row] // length + index - (counts_end - counts)[row]
    tile = jnp.where(index < counts_end[-1], tile, num_tiles)
    begin = jnp.maximum(begins[row] - tile * length, 0)
    end = jnp.minimum(ends[row] - tile * length, length)
    position = kv_lens[row] - ends[row] + tile * length
    first_key = jnp.zeros_like(row)
    if shared.window is not None:
        first_key = jnp.maximum(position + begin - (shared.window - 1), 0)
    tiles = jnp.arange(num_tiles + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(tile, tiles, side="left", method="compare_all").astype(jnp.int32)
    end_key, page_size = position + end, shared.page_size
    work = tpu_pages.Work.make(row, first_key, end_key, counts_end[-1], page_size)
    return work, (starts, position, begin, end)


@dataclass(frozen=True)
class _Call:
    """One call of `attend`: its arrays and what both kernels know of it."""

    layout: RowLayout
    config: Config
    sources: tuple[Array, ...]
    table: Array
    shared: tpu_kernels.Shared
    cost: pl.CostEstimate

    @classmethod
    def make(
        cls,
        q: Array,
        kv: KVCache,
        metadata: AttentionMetadata,
        group: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> _Call:
        values = values_of(kv)
        words, layout = values.words, values.layout
        (num_tokens, num_heads, head_dim), page_size = q.shape, words.shape[1]
        max_pages = metadata.page_table.shape[-1]
        config = tuning.choose(
            "paged_attention/pallas_tpu",
            f"N={num_heads},K={layout.num_kv_heads},H={head_dim},page={page_size},"
            f"q={q.dtype.name},kv={words.dtype.name}",
            device.current("tpu").kind,
            Config.for_call(layout, page_size, num_heads, num_tokens, max_pages),
        )
        # The same bytes: a page as one list of rows.
        sources: tuple[Array, ...] = (
            words.reshape(words.shape[0], page_size * layout.num_rows, LANES),
        )
        if isinstance(kv, QuantizedKV):
            sources = (*sources, kv.scales)
        keys = min(max_pages * page_size, 2048) * metadata.kv_lens.shape[0]
        cost = pl.CostEstimate(
            flops=4 * keys * num_heads * head_dim * -(-num_tokens // metadata.kv_lens.shape[0]),
            bytes_accessed=keys * layout.num_rows * LANES * 4 + 2 * q.size * q.dtype.itemsize,
            transcendentals=keys * num_heads,
        )
        compute = jnp.float32 if q.dtype == jnp.float32 or layout.per_word == 1 else jnp.bfloat16
        shared = tpu_kernels.Shared(
            layout=layout,
            page_size=page_size,
            chunks_per_row=-(-max_pages // tpu_pages.TABLE_CHUNK),
            group_size=num_heads // layout.num_kv_heads,
            compute_dtype=jnp.dtype(compute),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        table = tpu_pages.chunked(metadata.page_table[group])
        return cls(layout, config, sources, table, shared, cost)

    def run(
        self,
        kernel: Any,
        q: Array,
        work: tpu_pages.Work,
        more: tuple[Array, ...],
        tiles_per_step: int,
        length: int,
    ) -> Array:
        """Runs a kernel over tiles of so many tokens, some tiles a grid step."""
        num_tiles = -(-q.shape[0] // length)
        tiles_per_step = min(tiles_per_step, num_tiles)
        is_decode, config = kernel is tpu_kernels.decode, self.config
        pages = config.pages_per_block if is_decode else config.tile_pages_per_block
        is_merged = is_decode and tpu_kernels.merges_units(self.layout)
        tiled = _to_units(q, self.layout, num_tiles, length, self.shared, is_merged)
        block = pl.BlockSpec((tiles_per_step, *tiled.shape[1:]), lambda i, *_: (i, 0, 0, 0))
        in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        state = (*tiled.shape[1:3], LANES)
        keys = pages * self.shared.page_size
        bias = (tiled.shape[2], keys * self.layout.num_rows)
        out = pl.pallas_call(
            partial(kernel, self.shared, length),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(work) + len(more),
                grid=(-(-num_tiles // tiles_per_step),),
                in_specs=[block, in_hbm, *[in_hbm] * len(self.sources)],
                out_specs=block,
                scratch_shapes=[
                    pltpu.VMEM(state, jnp.float32),
                    pltpu.VMEM(state, jnp.float32),
                    pltpu.VMEM(tiled.shape[1:], jnp.float32),
                    *(pltpu.VMEM((*s.shape[1:3], keys), s.dtype) for s in self.sources[1:]),
                    *tpu_pages.scratch(config.num_buffers, self.sources, pages),
                    *[pltpu.VMEM(bias, jnp.float32)] * is_merged,
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(tiled.shape, q.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",),
                vmem_limit_bytes=_VMEM_BYTES,
                disable_bounds_checks=True,
            ),
            cost_estimate=self.cost,
            interpret=device.interpret_mode(),
            name=f"paged_attention_{kernel.__name__}",
        )(*work, *more, tiled, *tpu_pages.in_hbm(self.table, *self.sources))
        return _from_units(out, self.layout, length, q.shape, self.shared)


def _to_units(
    q: Array,
    layout: RowLayout,
    num_tiles: int,
    length: int,
    shared: tpu_kernels.Shared,
    is_merged: bool,
) -> Array:
    """Returns queries as `[tiles, units, rows, lanes]`, zero where another head's lanes are.

    A unit's rows are its heads' queries, head after head, token after token. Merged, all units
    are one.
    """
    heads = layout.num_units * layout.unit_heads
    q = q.reshape(q.shape[0], layout.num_kv_heads, shared.group_size, layout.head_dim)
    more = num_tiles * length - q.shape[0], heads - q.shape[1], 0
    q = jnp.pad(q, [(0, n) for n in (*more, layout.head_lanes - layout.head_dim)])
    q = q.reshape(num_tiles, length, layout.num_units, layout.unit_heads, *q.shape[2:])
    q = q.transpose(0, 2, 3, 1, 4, 5)  # [tiles, units, unit's heads, length, G, lanes]
    if layout.unit_heads > 1:
        own = jnp.eye(layout.row_heads, layout.unit_heads, dtype=bool)[:, None, None, :, None]
        q = jnp.where(own, q[:, :, : layout.row_heads, ..., None, :], 0)
    num_units = 1 if is_merged else layout.num_units
    q = q.reshape(num_tiles, num_units, -1, layout.unit_tiles * LANES)
    rows = q.shape[2]
    return jnp.pad(q, ((0, 0), (0, 0), (0, -rows % 8), (0, 0)))


def _from_units(
    out: Array,
    layout: RowLayout,
    length: int,
    shape: tuple[int, ...],
    shared: tpu_kernels.Shared,
) -> Array:
    """Undoes `_to_units`."""
    num_tiles, num_units, group_size = out.shape[0], layout.num_units, shared.group_size
    rows = num_units // out.shape[1] * layout.row_heads * length * group_size
    out = out[:, :, :rows].reshape(num_tiles, num_units, layout.row_heads, length, group_size, -1)
    lanes = layout.head_lanes
    heads = [out[:, :, i, ..., i * lanes : (i + 1) * lanes] for i in range(layout.row_heads)]
    out = jnp.stack(heads, axis=2)[..., : layout.head_dim]
    out = out.transpose(0, 3, 1, 2, 4, 5).reshape(num_tiles * length, -1, layout.head_dim)
    return out[: shape[0], : shape[1]]
