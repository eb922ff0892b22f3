"""Streams the pages of many rows from HBM through VMEM, many blocks ahead of their use.

Rows of work follow each other without a gap: while one row's last block is computed on, the next
rows' blocks are on their way. The page table stays in HBM, too; pieces of it go ahead to SMEM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int

from kernels import device

Ref = Any
TABLE_CHUNK = 128  # entries of the page table that one copy brings
_TABLE_SLOTS = 4

# What `state` holds: the block to fetch next, how many were fetched; the chunk of the page table
# to fetch next, how many were fetched and how many of them were used; blocks computed on.
_ROW, _BLOCK, _FETCHED, _CHUNK_ROW, _CHUNK, _CHUNKS_FETCHED, _CHUNKS_USED, _USED = range(8)


class Work(NamedTuple):
    """Rows of work, as arrays to prefetch to SMEM: which keys of which row of the page table.

    Attributes:
      row: `[W]` the row of the page table.
      first_key, end_key: `[W]` the keys that any query of the work sees.
      first_page, end_page: `[W]` the pages that hold them.
      num_works: `[1]` how many there are.
    """

    row: Array
    first_key: Array
    end_key: Array
    first_page: Array
    end_page: Array
    num_works: Array

    @classmethod
    def make(
        cls, row: Array, first_key: Array, end_key: Array, count: Array, page_size: int
    ) -> Work:
        """Adds the pages."""
        first_page, end_page = first_key // page_size, (end_key + page_size - 1) // page_size
        return cls(row, first_key, end_key, first_page, end_page, count[None])


def chunked(page_table: Int[Array, "B M"]) -> Int[Array, "chunks one chunk"]:
    """Returns a page table as the chunks that `Pages` fetches, each row in whole chunks.

    The same for all layers that share a table, so XLA makes it once a step.
    """
    num_rows, max_pages = page_table.shape
    per_row = -(-max_pages // TABLE_CHUNK)
    padded = jnp.pad(page_table, ((0, 0), (0, per_row * TABLE_CHUNK - max_pages)))
    return padded.reshape(num_rows * per_row, 1, TABLE_CHUNK)


def in_hbm(*arrays: Array) -> tuple[Array, ...]:
    """Keeps arguments of a kernel in HBM: XLA would copy whole small caches to VMEM before it."""
    if device.interpret_mode():
        return arrays
    return tuple(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in arrays)


def scratch(slots: int, sources: tuple[Array, ...], pages: int) -> list[Any]:
    """Returns the scratch shapes of `Pages`; each slot holds so many pages of each source."""
    return [
        pltpu.SMEM((_TABLE_SLOTS, 1, TABLE_CHUNK), jnp.int32),
        pltpu.SMEM((8,), jnp.int32),
        pltpu.SemaphoreType.DMA((_TABLE_SLOTS,)),
        pltpu.SemaphoreType.DMA((slots,)),
        *(pltpu.VMEM((slots, pages, *source.shape[1:]), source.dtype) for source in sources),
    ]


class Pages(NamedTuple):
    """The stream of blocks of pages, inside a kernel.

    Attributes:
      work: the rows of work, in SMEM.
      table: the chunked page table, in HBM.
      sources: arrays `[P, ...]` in HBM of which each block holds some pages.
      scratch: refs of `scratch(...)`.
      chunks_per_row: chunks of a row of the page table.
    """

    work: Work
    table: Ref
    sources: tuple[Ref, ...]
    scratch: tuple[Ref, ...]
    chunks_per_row: int

    @property
    def buffers(self) -> tuple[Ref, ...]:
        """Where each source's pages arrive, `[slots, pages, ...]`."""
        return self.scratch[4:]

    @property
    def pages_per_block(self) -> int:
        """Pages of a block, a divisor of `TABLE_CHUNK`."""
        return self.buffers[0].shape[1]

    def blocks(self, index: Array) -> tuple[Array, Array]:
        """Returns the first block of some work, and the end of its blocks: at least one."""
        shift = self.pages_per_block.bit_length() - 1
        first = self.work.first_page[index] >> shift
        end = (self.work.end_page[index] + (self.pages_per_block - 1)) >> shift
        return first, jnp.maximum(end, first + 1)

    def start(self) -> None:
        """Starts as many copies as there is room for; once, before any other call."""
        state = self.scratch[1]
        for i in range(8):
            state[i] = jnp.int32(0)

        @pl.when(self.work.num_works[0] > 0)
        def _() -> None:
            first = self.blocks(jnp.int32(0))[0]
            state[_BLOCK] = first
            state[_CHUNK] = self._chunk(first)

        _repeat(0, _TABLE_SLOTS - 1, lambda _: self._fetch_chunk())
        _repeat(0, self.buffers[0].shape[0] - 1, lambda _: self._fetch_block())

    def next(self, index: Array, block: Array) -> Array:
        """Waits for the next block, which is this one, and returns the slot that it is in.

        The slot that the call before returned is then filled anew.
        """
        state, slots = self.scratch[1], self.buffers[0].shape[0]
        self._fetch_block()
        slot = lax.rem(state[_USED], jnp.int32(slots))
        state[_USED] += 1
        self._each_page(index, block, lambda i: self._copies(jnp.int32(0), slot, i, "wait"))
        return slot

    def _fetch_block(self) -> None:
        """Starts the copies of the block at the cursor, if there is one, and moves on."""
        table, state, chunk_sems, _ = self.scratch[:4]
        index, block = state[_ROW], state[_BLOCK]

        @pl.when(index < self.work.num_works[0])
        def fetch() -> None:
            first, end = self.blocks(index)
            begin = (block * self.pages_per_block) & (TABLE_CHUNK - 1)

            @pl.when((block == first) | (begin == 0))
            def take_chunk() -> None:
                used = state[_CHUNKS_USED] & (_TABLE_SLOTS - 1)
                pltpu.make_async_copy(self.table.at[0], table.at[used], chunk_sems.at[used]).wait()
                state[_CHUNKS_USED] += 1
                self._fetch_chunk()

            chunk = (state[_CHUNKS_USED] - 1) & (_TABLE_SLOTS - 1)
            slot = lax.rem(state[_FETCHED], jnp.int32(self.buffers[0].shape[0]))
            self._each_page(
                index,
                block,
                lambda i: self._copies(table[chunk, 0, begin + i], slot, i, "start"),
            )
            state[_FETCHED] += 1
            self._advance(_ROW, _BLOCK, index, block + 1, end, lambda i: self.blocks(i)[0])

    def _fetch_chunk(self) -> None:
        """Starts the copy of the chunk of the page table at its cursor, and moves on."""
        table, state, chunk_sems, _ = self.scratch[:4]
        index, chunk = state[_CHUNK_ROW], state[_CHUNK]

        @pl.when(index < self.work.num_works[0])
        def fetch_chunk() -> None:
            slot = state[_CHUNKS_FETCHED] & (_TABLE_SLOTS - 1)
            source = self.work.row[index] * self.chunks_per_row + chunk
            pltpu.make_async_copy(
                self.table.at[source], table.at[slot], chunk_sems.at[slot]
            ).start()
            state[_CHUNKS_FETCHED] += 1
            end = self._chunk(self.blocks(index)[1] - 1) + 1
            self._advance(
                _CHUNK_ROW, _CHUNK, index, chunk + 1, end, lambda i: self._chunk(self.blocks(i)[0])
            )

    def _advance(
        self,
        row: int,
        column: int,
        index: Array,
        following: Array,
        end: Array,
        first_of: Callable[[Array], Array],
    ) -> None:
        """Moves a cursor to the next block or chunk of its work, or to the next work's first."""
        state = self.scratch[1]
        last = self.work.num_works[0] - 1
        is_done = following >= end
        state[row] = jnp.where(is_done, index + 1, index)
        state[column] = jnp.where(is_done, first_of(jnp.minimum(index + 1, last)), following)

    def _chunk(self, block: Array) -> Array:
        return block >> (TABLE_CHUNK // self.pages_per_block).bit_length() - 1

    def _each_page(self, index: Array, block: Array, act: Callable[[Array], None]) -> None:
        """Acts on each page of a block that holds a key of the work."""
        begin = block * self.pages_per_block

        lower = jnp.maximum(self.work.first_page[index] - begin, 0)
        upper = jnp.minimum(self.work.end_page[index] - begin, self.pages_per_block)
        _repeat(lower, upper, act)

    def _copies(self, page: Array, slot: Array, place: Array, action: str) -> None:
        for source, buffer in zip(self.sources, self.buffers, strict=True):
            copy = pltpu.make_async_copy(
                source.at[page], buffer.at[slot, place], self.scratch[3].at[slot]
            )
            getattr(copy, action)()


def _repeat(lower: Array | int, upper: Array | int, act: Callable[[Array], None]) -> None:
    def step(i: Array, carry: None) -> None:
        act(i)
        return carry

    lax.fori_loop(lower, upper, step, None)
