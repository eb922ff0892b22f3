"""What the Mosaic GPU kernels of paged attention share: how blocks of keys reach shared memory.

A block is a run of consecutive keys of one row, fetched by one TMA box per page, of the view
`[P, page, K, 2 * H]` of a cache: keys are its left half, values its right half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import device
from kernels._compat import load_as
from kernels.paged_attention.cache import KVCache, QuantizedKV, held_by, values_of

Ref: TypeAlias = Any

MASKED = -1e30  # finite: the difference of two infinities would be NaN
LOG2_E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
OF_ROWS = WGMMA.reduce(1)  # of a vector with an element per row of a matrix
OF_COLUMNS = WGMMA.reduce(0)


def swizzle_of(num_columns: int, dtype: Any) -> int | None:
    """Returns the widest swizzle whose tiles divide a matrix's columns, None where none does."""
    row = num_columns * jnp.dtype(dtype).itemsize
    return next((swizzle for swizzle in (128, 64, 32) if row % swizzle == 0), None)


def tile_width(num_columns: int, dtype: Any) -> int:
    """Returns the columns of a matrix that may be addressed by themselves."""
    swizzle = swizzle_of(num_columns, dtype)
    return num_columns if swizzle is None else swizzle // jnp.dtype(dtype).itemsize


def matrix(shape: tuple[int, ...], dtype: Any, swizzle: int | None) -> Any:
    """Returns a shared memory buffer whose last two axes are laid out as wgmma reads them."""
    if swizzle is None:
        return plgpu.SMEM(shape, dtype)
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)),
    )


@dataclass(frozen=True)
class Blocks:
    """How one layer's keys and values are cut into blocks, and where a stage holds them.

    Attributes:
      block_keys: keys of a block, a multiple of 64.
      stages: blocks in shared memory at a time.
      page_size, head_dim: of the cache.
      dtype: of the queries, and of what wgmma multiplies.
      is_int8: whether the cache holds codes with scales.
      value_rows: rows of the transposed values as wgmma's left operand, else 0.
      group: of the page table.
    """

    block_keys: int
    stages: int
    page_size: int
    head_dim: int
    dtype: Any
    is_int8: bool
    value_rows: int
    group: int

    @property
    def chunk(self) -> int:
        """Keys of one copy: they lie in one page."""
        return math.gcd(self.page_size, self.block_keys)

    @property
    def value_dtype(self) -> Any:
        """Of weights and values: weights times a scale of the values may be too small for f16."""
        return jnp.bfloat16 if self.is_int8 else self.dtype

    @property
    def swizzle(self) -> int:
        """Of everything that wgmma reads in 16 bits."""
        swizzle = swizzle_of(self.head_dim, self.dtype)
        assert swizzle is not None, "supports() refuses such a head_dim"
        return swizzle

    @property
    def has_split_halves(self) -> bool:
        """Whether values have a buffer of their own, wider than they are."""
        return not self.is_int8 and self.value_rows > self.head_dim

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        if self.is_int8:
            return self.block_keys * 2 * (self.head_dim + 4)
        width = self.head_dim + max(self.head_dim, self.value_rows)
        return self.block_keys * width * jnp.dtype(self.dtype).itemsize

    @property
    def num_copies(self) -> int:
        """Copies of one block, which is how often a full barrier is arrived at."""
        chunks = self.block_keys // self.chunk
        if self.has_split_halves:
            return chunks + self.block_keys // 8
        return 3 * chunks if self.is_int8 else chunks

    def scratch(self) -> dict[str, Any]:
        """Returns the buffers and barriers of the stages, by name."""
        shape, width = (self.stages, self.block_keys), 2 * self.head_dim
        barriers = {
            "full": plgpu.Barrier(num_arrivals=self.num_copies, num_barriers=self.stages),
        }
        if self.has_split_halves:
            return barriers | {
                "keys": matrix((*shape, self.head_dim), self.dtype, self.swizzle),
                "values": matrix((*shape, self.value_rows), self.dtype, self.swizzle),
            }
        if not self.is_int8:
            return barriers | {"both": matrix((*shape, width), self.dtype, self.swizzle)}
        return barriers | {
            "both": matrix((*shape, width), jnp.int8, swizzle_of(self.head_dim, jnp.int8)),
            "key_scales": plgpu.SMEM(shape, jnp.float32),
            "value_scales": plgpu.SMEM(shape, jnp.float32),
        }

    def halves(self, refs: dict[str, Ref], slot: Array) -> tuple[Ref, Ref]:
        """Returns a stage's keys and values `[block_keys, H]`."""
        head_dim = self.head_dim
        if self.has_split_halves:
            return refs["keys"].at[slot], refs["values"].at[slot, :, pl.ds(0, head_dim)]
        both = refs["both"].at[slot]
        return both.at[:, pl.ds(0, head_dim)], both.at[:, pl.ds(head_dim, head_dim)]

    def views(self, kv: KVCache) -> tuple[Array, ...]:
        """Returns the cache as `fetch` takes it, which moves no bytes: pages cut into chunks.

        Values are `[P * page / chunk, chunk, K, 2 * H]`; scales, of int8 alone,
        `[P, K, 2, page / chunk, chunk]`.
        """
        values = held_by(values_of(kv))
        view = values.reshape(-1, self.chunk, values.shape[2], 2 * self.head_dim)
        if not isinstance(kv, QuantizedKV):
            return (view,)
        return view, kv.scales.reshape(*kv.scales.shape[:3], -1, self.chunk)


@dataclass(frozen=True)
class Fetch:
    """Copies the blocks of a row's keys and values, of one KV head, into the stages.

    Attributes:
      blocks: how the keys are cut.
      cache: references to `Blocks.views`.
      table: reference to the page table `[C, B, M]`.
      refs: the scratch by name, a barrier "consumed" of the stages among it.
      row, head: whose.
    """

    blocks: Blocks
    cache: list[Ref]
    table: Ref
    refs: dict[str, Ref]
    row: Array
    head: Array

    def __call__(self, begin: Array, end: Array) -> None:
        """Fetches the blocks `[begin, end)`, each when its stage has been consumed.

        Page numbers are read two blocks ahead, so that their latency passes while it waits.
        """

        def fetch_next(i: Array, ahead: tuple[tuple[Array, ...], ...]) -> Any:
            slot = lax.rem(i, jnp.int32(self.blocks.stages))
            later = self._pages(begin + i + len(ahead))

            @pl.when(i >= self.blocks.stages)
            def _wait() -> None:
                plgpu.barrier_wait(self.refs["consumed"].at[slot])

            self._fetch(begin + i, slot, ahead[0])
            return (*ahead[1:], later)

        first = tuple(self._pages(begin + i) for i in range(2))
        lax.fori_loop(0, end - begin, fetch_next, first)

    def _pages(self, block: Array) -> tuple[Array, ...]:
        """Reads the page of each chunk of a block from the table; past its end, any page."""
        blocks, last = self.blocks, self.table.shape[2] - 1
        return tuple(
            self.table[
                blocks.group,
                self.row,
                jnp.minimum(lax.div(block * blocks.block_keys + begin, blocks.page_size), last),
            ]
            for begin in range(0, blocks.block_keys, blocks.chunk)
        )

    def _fetch(self, block: Array, slot: Array, pages: tuple[Array, ...]) -> None:
        """Starts a block's copies; where there are several, the four warps share them."""
        chunks_of_page = self.blocks.page_size // self.blocks.chunk

        def fetch_chunk(i: int, page: Array) -> None:
            chunk: Any = 0
            if chunks_of_page > 1:
                chunk = lax.rem(block * len(pages) + i, chunks_of_page)
            self._fetch_chunk(slot, i * self.blocks.chunk, page, chunk)

        def fetch_share(warp: Array) -> None:
            for i, page in enumerate(pages):
                pl.when(warp == i % 4)(partial(fetch_chunk, i, page))

        if self.blocks.num_copies == 1:
            fetch_chunk(0, pages[0])
        else:
            plgpu.warp_map(fetch_share)

    def _fetch_chunk(self, slot: Array, begin: int, page: Array, chunk: Any) -> None:
        """Starts the copies of a chunk of a page into a stage, from key `begin` of it on."""
        blocks, refs = self.blocks, self.refs
        source = self.cache[0].at[page * (blocks.page_size // blocks.chunk) + chunk, :, self.head]
        here, full = pl.ds(begin, blocks.chunk), refs["full"].at[slot]
        if not blocks.has_split_halves:
            plgpu.copy_gmem_to_smem(source, refs["both"].at[slot, here], full)
            scales = ("key_scales", "value_scales") if blocks.is_int8 else ()
            for half, name in enumerate(scales):
                of_half = self.cache[1].at[page, self.head, half, chunk]
                plgpu.copy_gmem_to_smem(of_half, refs[name].at[slot, here], full)
            return
        keys, values = pl.ds(0, blocks.head_dim), pl.ds(blocks.head_dim, blocks.head_dim)
        plgpu.copy_gmem_to_smem(source.at[:, keys], refs["keys"].at[slot, here], full)
        for row in range(0, blocks.chunk, 8):  # only a row of tiles is contiguous
            there = refs["values"].at[slot, pl.ds(begin + row, 8), keys]
            plgpu.copy_gmem_to_smem(source.at[pl.ds(row, 8), values], there, full)


def zero_rows(values: Ref, is_kept: Callable[[Array], Array]) -> None:
    """Zeroes the rows of a matrix in shared memory that are not kept: times 0, NaN is NaN."""
    num_rows, num_columns = values.shape
    width = tile_width(num_columns, values.dtype)  # in parts, which take few registers
    for begin in range(0, num_rows, 64):
        row = begin + plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=WGMMA)
        for column in range(0, num_columns, width):
            part = values.at[pl.ds(begin, 64), pl.ds(column, width)]
            held = load_as(part, WGMMA)
            part[...] = jnp.where(is_kept(row), held, jnp.zeros_like(held))


def from_codes(codes: Ref, dtype: Any) -> Array:
    """Loads int8 codes as floats, laid out as they convert: a layout_cast away from wgmma's."""
    # Rows of 80 codes have no swizzle: their loads conflict.
    is_swizzled = swizzle_of(codes.shape[1], jnp.int8) is not None
    held = load_as(codes, plgpu.Layout.WGMMA_UPCAST_2X, optimized=is_swizzled)
    return held.astype(dtype)


def decode(codes: Ref, floats: Ref) -> None:
    """Decodes a matrix of int8 codes, all in shared memory."""
    num_rows, num_columns = codes.shape
    width = tile_width(num_columns, codes.dtype)  # in parts, which take few registers
    for begin in range(0, num_rows, 64):
        for column in range(0, num_columns, width):
            part = (pl.ds(begin, 64), pl.ds(column, width))
            floats.at[part][...] = from_codes(codes.at[part], floats.dtype)


def multiply(shape: tuple[int, ...], left: Array | Ref, right: Ref) -> Array:
    """Returns the float32 product of a matrix in registers or shared memory, and one in shared."""
    if isinstance(left, Array) and device.interpret_mode():
        # The interpreter of jax 0.12 knows wgmma with references only. What threads read, unlike
        # what wgmma reads, needs a fence before TMA may overwrite it.
        product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return product

    def accumulate(sums: Ref) -> Array:
        plgpu.wgmma(sums, left, right)
        return plgpu.layout_cast(sums[...], WGMMA)

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((shape[0], shape[1]), jnp.float32))


def accumulate(sums: Array, left: Array, right: Ref) -> Array:
    """Returns sums plus the product of a matrix in registers and one in shared memory."""
    if device.interpret_mode():  # it knows no initial sums, and wgmma with references only
        return sums + multiply(sums.shape, left, right)
    product: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))
    return plgpu.layout_cast(product(plgpu.WGMMAAccumulatorRef.init(sums)), WGMMA)


def scores_of(products: Array, scale: float, soft_cap: float | None) -> Array:
    """Returns scores from `q . k`, as exponents of 2."""
    if soft_cap is None:
        return products * np.float32(scale * LOG2_E)
    # tanh by exp2: the approximate tanh is off by 2**-11 of its value, this by 2**-22.
    power = jnp.exp2(products * np.float32(2 * scale * LOG2_E / soft_cap))
    bounded = np.float32(soft_cap * LOG2_E) * (1.0 - 2.0 / (1.0 + power))
    return plgpu.layout_cast(bounded, WGMMA)


def columns(vector: Array, shape: tuple[int, ...]) -> Array:
    """Repeats an element per column over the rows of a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (1,)), WGMMA)


def rows(vector: Array, shape: tuple[int, ...]) -> Array:
    """Repeats an element per row over the columns of a matrix."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (0,)), WGMMA)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    """Returns float32 registers of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def compiler_params() -> Any:
    """Returns what every kernel is compiled with."""
    semantics = plgpu.LoweringSemantics.Warpgroup  # jax 0.10 defaults to Lane's
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=semantics)
