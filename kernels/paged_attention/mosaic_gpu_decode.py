"""Mosaic GPU attention of decode rows: one query per row, its keys split over thread blocks.

The keys are wgmma's rows (M = 64) and the query heads of a KV head its columns, so that 8 heads
cost no padding: `S' = K Q'`, softmax down the columns, `O' = V' P'`. One warpgroup fetches, one
computes; two or more thread blocks fit an SM, and fill each other's waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import device
from kernels._compat import load_as, transpose_ref
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

_MIN_SPLIT_BLOCKS = 2  # a split of fewer costs more to start and to merge than it saves


@dataclass(frozen=True)
class DecodeKernel:
    """The kernel for one shape of call.

    Attributes:
      blocks: how keys reach shared memory.
      heads: query heads of a thread block, padded to a multiple of 8; all of one KV head.
      blocks_per_kv_head: thread blocks that share a KV head.
      num_splits: parts of a row's keys, each a thread block.
      scale, window, soft_cap: as of `attend`.
    """

    blocks: Blocks
    heads: int
    blocks_per_kv_head: int
    num_splits: int
    scale: float
    window: int | None
    soft_cap: float | None

    def __call__(
        self, q: Array, kv: KVCache, kv_lens: Array, table: Array
    ) -> tuple[Array, Array, Array]:
        """Returns what each split adds: weighted values, the largest score, the sum of weights.

        Scores are exponents of 2. A split without keys has MASKED and zeros.

        Args:
          q: `[B, K * blocks_per_kv_head, heads, H]`.
          kv: the layer's cache.
          kv_lens: `[B]`, 0 for a row to leave out.
          table: `[C, B, M]`.
        """
        num_rows, num_heads = q.shape[:2]
        partial = (num_rows, num_heads, self.num_splits)
        value_rows, heads = self.blocks.value_rows, self.heads

        def body(*refs: Ref, **scratch: Ref) -> None:
            place = tuple(lax.axis_index(name) for name in ("row", "split", "head"))
            warpgroup = lax.axis_index("warpgroup")
            *inputs, out, peak, total = refs
            pl.when(warpgroup == 0)(lambda: self._fetch(place, inputs, scratch))
            pl.when(warpgroup == 1)(
                lambda: self._attend(place, inputs, (out, peak, total), scratch)
            )

        weighted, peak, total = plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((*partial, value_rows, heads), jnp.float32),
                jax.ShapeDtypeStruct((*partial, heads), jnp.float32),
                jax.ShapeDtypeStruct((*partial, heads), jnp.float32),
            ],
            scratch_types=self._scratch(),
            grid=(num_rows, self.num_splits, num_heads),
            grid_names=("row", "split", "head"),
            num_threads=2,
            thread_name="warpgroup",
            interpret=device.interpret_mode(),
            compiler_params=shared.compiler_params(),
        )(q, *self.blocks.views(kv), kv_lens, table)
        return weighted, peak, total

    def _scratch(self) -> dict[str, Any]:
        blocks, heads = self.blocks, self.heads
        scratch = blocks.scratch() | {
            "queries": shared.matrix((heads, blocks.head_dim), blocks.dtype, blocks.swizzle),
            "weights": shared.matrix(
                (heads, blocks.block_keys), blocks.value_dtype, blocks.swizzle
            ),
            "out": plgpu.SMEM((blocks.value_rows, heads), jnp.float32),
            "peak": plgpu.SMEM((heads,), jnp.float32),
            "total": plgpu.SMEM((heads,), jnp.float32),
            "queries_here": plgpu.Barrier(),
            "consumed": plgpu.Barrier(num_barriers=blocks.stages),
        }
        if blocks.is_int8:
            shape = (blocks.block_keys, blocks.value_rows)
            scratch["decoded"] = shared.matrix(shape, blocks.value_dtype, blocks.swizzle)
        return scratch

    def _range(self, row: Array, split: Array, kv_lens: Ref) -> tuple[Array, ...]:
        """Returns the blocks `[begin, end)` of a split, and the row's keys `[first, kv_len)`."""
        kv_len, size = kv_lens[row], self.blocks.block_keys
        first = jnp.int32(0) if self.window is None else jnp.maximum(kv_len - self.window, 0)
        begin, end = lax.div(first, size), lax.div(kv_len + (size - 1), size)
        length = lax.div(end - begin + (self.num_splits - 1), self.num_splits)
        length = jnp.maximum(length, _MIN_SPLIT_BLOCKS)
        begin = begin + split * length
        return begin, jnp.maximum(jnp.minimum(begin + length, end), begin), first, kv_len

    def _fetch(self, place: tuple[Array, ...], inputs: list[Ref], scratch: dict[str, Ref]) -> None:
        row, split, head = place
        q, *cache, kv_lens, table = inputs
        plgpu.copy_gmem_to_smem(q.at[row, head], scratch["queries"], scratch["queries_here"])
        begin, end, _, _ = self._range(row, split, kv_lens)
        kv_head = lax.div(head, self.blocks_per_kv_head)
        Fetch(self.blocks, cache, table, scratch, row, kv_head)(begin, end)

    def _attend(
        self,
        place: tuple[Array, ...],
        inputs: list[Ref],
        outputs: tuple[Ref, ...],
        scratch: dict[str, Ref],
    ) -> None:
        row, split, head = place
        blocks, heads = self.blocks, self.heads
        begin, end, first, kv_len = self._range(row, split, inputs[-2])
        plgpu.barrier_wait(scratch["queries_here"])

        def fold(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            slot = lax.rem(i, jnp.int32(blocks.stages))
            plgpu.barrier_wait(scratch["full"].at[slot])
            state = self._fold(scratch, slot, (begin + i) * blocks.block_keys, first, kv_len, state)
            plgpu.barrier_arrive(scratch["consumed"].at[slot])
            return state

        state = (
            shared.filled((heads,), MASKED, OF_COLUMNS),
            shared.filled((blocks.block_keys, heads), 0.0, WGMMA),
            shared.filled((blocks.value_rows, heads), 0.0, WGMMA),
        )
        peak, total, out = lax.fori_loop(0, end - begin, fold, state)
        results = {"out": out, "peak": peak, "total": total.sum(axis=0)}
        for name, result in results.items():
            scratch[name][...] = result
        plgpu.commit_smem()
        for name, output in zip(results, outputs, strict=True):
            plgpu.copy_smem_to_gmem(scratch[name], output.at[row, head, split])
        plgpu.wait_smem_to_gmem(0)

    def _fold(
        self,
        scratch: dict[str, Ref],
        slot: Array,
        key: Array,
        first: Array,
        kv_len: Array,
        state: tuple[Array, Array, Array],
    ) -> tuple[Array, Array, Array]:
        """Folds the block that begins with `key` into the largest score, weights and values."""
        blocks = self.blocks
        shape = (blocks.block_keys, self.heads)
        peak, total, out = state
        keys, values = blocks.halves(scratch, slot)
        if blocks.is_int8:
            keys = plgpu.layout_cast(shared.from_codes(keys, blocks.dtype), WGMMA)
        scores = shared.multiply(shape, keys, transpose_ref(scratch["queries"]))
        if blocks.is_int8:
            scores *= shared.rows(load_as(scratch["key_scales"].at[slot], OF_ROWS), shape)
        scores = shared.scores_of(scores, self.scale, self.soft_cap)
        position = key + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        is_seen = (position >= first) & (position < kv_len)
        scores = jnp.where(is_seen, scores, MASKED)

        new_peak = jnp.maximum(peak, scores.max(axis=0))
        weights = jnp.exp2(scores - shared.columns(new_peak, shape))
        weights = jnp.where(is_seen, weights, 0.0)
        decay = jnp.exp2(peak - new_peak)
        total = total * shared.columns(decay, shape) + weights
        if blocks.is_int8:
            of_values = load_as(scratch["value_scales"].at[slot], OF_ROWS)
            weights = jnp.where(is_seen, weights * shared.rows(of_values, shape), 0.0)
            decoded = scratch["decoded"].at[:, pl.ds(0, blocks.head_dim)]
            shared.decode(values, decoded)
        else:

            @pl.when((key < first) | (key + blocks.block_keys > kv_len))
            def _zero_unseen() -> None:
                shared.zero_rows(values, lambda i: (key + i >= first) & (key + i < kv_len))

        weights = plgpu.layout_cast(
            weights.astype(blocks.value_dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        transpose_ref(scratch["weights"])[...] = weights
        plgpu.commit_smem()
        padded = self._padded_values(scratch, slot)
        shape = (blocks.value_rows, self.heads)
        sums = shared.multiply(shape, transpose_ref(padded), transpose_ref(scratch["weights"]))
        return new_peak, total, out * shared.columns(decay, shape) + sums

    def _padded_values(self, scratch: dict[str, Ref], slot: Array) -> Ref:
        """Returns the values `[block_keys, value_rows]`; what is past head_dim may be anything."""
        if self.blocks.is_int8:
            return scratch["decoded"]
        if self.blocks.has_split_halves:
            return scratch["values"].at[slot]
        return self.blocks.halves(scratch, slot)[1]
