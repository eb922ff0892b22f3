"""The bodies of the TPU kernels: what they do with each block of pages that `Pages` brings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.paged_attention.reference import MASKED
from kernels.paged_attention.tpu_layout import LANES, RowLayout
from kernels.paged_attention.tpu_pages import Pages, Work

Ref = Any
_LOG2_E = 1.4426950408889634
_UNROLLED_SCORES = 64  # vector registers that the scores of the heads done at once may fill


class Shared(NamedTuple):
    """What both kernels know of a call when they are traced."""

    layout: RowLayout
    page_size: int
    chunks_per_row: int
    group_size: int
    compute_dtype: np.dtype
    scale: float
    window: int | None
    soft_cap: float | None


class _State(NamedTuple):
    """Softmaxes in progress, to base 2, one a row of a unit: refs `[units, rows, lanes]`."""

    peak: Ref
    total: Ref
    weighted: Ref

    def clear(self) -> None:
        self.peak[...] = jnp.full(self.peak.shape, MASKED, jnp.float32)
        self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        self.weighted[...] = jnp.zeros(self.weighted.shape, jnp.float32)

    def weigh(self, score: Array, mine: Any = slice(None)) -> tuple[Array, Array]:
        """Returns a block's weights, and by what to multiply the values weighted before."""
        old_peak = self.peak[mine]
        peak = jnp.maximum(old_peak, score.max(-1, keepdims=True))
        weights = jnp.exp2(score - _across(peak, score.shape[-1]))
        decay = jnp.exp2(old_peak - peak)
        self.peak[mine] = peak
        self.total[mine] = self.total[mine] * decay + weights.sum(-1, keepdims=True)
        return weights, _across(decay, self.weighted.shape[-1])

    def result(self) -> Array:
        total = _across(self.total[...], self.weighted.shape[-1])
        return self.weighted[...] / total


def merges_units(layout: RowLayout) -> bool:
    """Whether `decode` scores all heads' queries against all heads' keys, and masks.

    That wastes products, of which there are plenty, and saves the strided loads that tell heads
    apart: one a cycle, and two for each register when a token has 8 rows.
    """
    return layout.per_word == 2 and layout.unit_tiles == 1 and layout.num_rows > 1


def decode(shared: Shared, length: int, *refs: Ref) -> None:
    """Rows of one query: a grid step does some rows, one after the other."""
    work, (q, table, *others) = Work(*refs[:6]), refs[6:]
    bias = others.pop() if merges_units(shared.layout) else None
    out, state, scales, pages = _unpack(shared, work, table, others)
    step, num_rows = pl.program_id(0), q.shape[0]

    @pl.when(step == 0)
    def _() -> None:
        pages.start()
        if bias is not None:
            bias[...] = _bias(bias.shape, shared)

    begin = step * num_rows
    end = jnp.minimum(begin + num_rows, work.num_works[0])

    @pl.when(end < begin + num_rows)
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    def attend_row(index: Array, carry: None) -> None:
        place = index - begin
        first_block, end_block = pages.blocks(index)
        state.clear()

        def fold_block(block: Array, carry: None) -> None:
            fold = _Block.bring(shared, pages, work, index, block, scales, length)
            if bias is None:
                fold.into(state, lambda unit: q[place, unit], fold.is_seen)
            else:
                fold.merged_into(state, q[place], bias[...])
            return carry

        lax.fori_loop(first_block, end_block, fold_block, None)
        out[place] = state.result().astype(out.dtype)
        return carry

    lax.fori_loop(begin, jnp.maximum(end, begin), attend_row, None)


def ragged(shared: Shared, length: int, *refs: Ref) -> None:
    """Tiles of tokens, one a grid step; rows that share a tile follow each other."""
    work = Work(*refs[:6])
    starts, position, begin, end, q, table, *others = refs[6:]
    out, state, scales, pages = _unpack(shared, work, table, others)
    tile = pl.program_id(0)
    pl.when(tile == 0)(pages.start)
    out[...] = jnp.zeros(out.shape, out.dtype)

    def attend_row(index: Array, carry: None) -> None:
        token = _token(q.shape[2], length, shared.group_size)
        is_own = (token >= begin[index]) & (token < end[index])
        last_seen = jnp.where(is_own, position[index] + token, -1)
        first_block, end_block = pages.blocks(index)
        state.clear()

        def fold_block(block: Array, carry: None) -> None:
            fold = _Block.bring(shared, pages, work, index, block, scales, length)
            key = fold.keys((last_seen.shape[0], fold.size), 1)
            visible = key <= last_seen
            if shared.window is not None:
                visible &= key > last_seen - shared.window
            fold.into(state, lambda unit: q[0, unit], visible)
            return carry

        lax.fori_loop(first_block, end_block, fold_block, None)
        kept = jnp.broadcast_to(is_own[None], out.shape[1:])
        out[0] = jnp.where(kept, state.result().astype(out.dtype), out[0])
        return carry

    lax.fori_loop(starts[tile], starts[tile + 1], attend_row, None)


def _unpack(
    shared: Shared, work: Work, table: Ref, others: list[Ref]
) -> tuple[Ref, _State, Ref, Pages]:
    """Sorts the refs of a kernel that follow the page table."""
    num_sources = 2 if shared.layout.per_word == 4 else 1
    sources, (out, *scratch) = others[:num_sources], others[num_sources:]
    scales = scratch.pop(3) if num_sources == 2 else None
    pages = Pages(work, table, tuple(sources), tuple(scratch[3:]), shared.chunks_per_row)
    return out, _State(*scratch[:3]), scales, pages


def _token(num_rows: int, length: int, group_size: int) -> Array:
    """Returns which of the tile's tokens each row of a unit belongs to, `[rows, 1]`."""
    row = lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
    row -= _quotient(row, length * group_size) * (length * group_size)
    return _quotient(row, group_size)


def _bias(shape: tuple[int, int], shared: Shared) -> Array:
    """Returns what masks the scores of a query and another unit's key, `[rows, keys * R]`."""
    layout = shared.layout
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    unit = column - _quotient(column, layout.num_rows) * layout.num_rows
    is_own = _quotient(row, layout.row_heads * shared.group_size) == unit
    return jnp.where(is_own, 0.0, MASKED)


def _quotient(values: Array, divisor: int) -> Array:
    """Divides small integers, which vectors of a TPU cannot."""
    return ((values.astype(jnp.float32) + 0.5) * (1 / divisor)).astype(jnp.int32)


class _Block(NamedTuple):
    """Some pages of a row in VMEM, and which of their keys the work sees."""

    shared: Shared
    pages: Pages
    slot: Array
    block: Array
    first_key: Array
    end_key: Array
    scales: Ref
    length: int

    @classmethod
    def bring(
        cls,
        shared: Shared,
        pages: Pages,
        work: Work,
        index: Array,
        block: Array,
        scales: Ref,
        length: int,
    ) -> _Block:
        """Waits for a block of a work's pages, and makes it ready to be folded."""
        slot = pages.next(index, block)
        first_key, end_key = work.first_key[index], work.end_key[index]
        brought = cls(shared, pages, slot, block, first_key, end_key, scales, length)
        brought._gather_scales()
        brought._clear_unseen()
        return brought

    @property
    def size(self) -> int:
        """Keys of the block."""
        return self.pages.pages_per_block * self.shared.page_size

    def keys(self, shape: tuple[int, int], axis: int) -> Array:
        """Returns the position of the block's keys, along one axis."""
        return self.block * self.size + lax.broadcasted_iota(jnp.int32, shape, axis)

    @property
    def is_seen(self) -> Array:
        """Whether any query sees a key, `[1, keys]`."""
        key = self.keys((1, self.size), 1)
        return (key >= self.first_key) & (key < self.end_key)

    def into(self, state: _State, query: Any, visible: Array) -> None:
        """Folds the block into the softmaxes of all units, those of some groups at once."""
        layout = self.shared.layout
        rows = state.peak.shape[1] * max(self.size // LANES, 1) // 8
        at_once = max(_UNROLLED_SCORES // (rows * layout.group_units), 1)
        at_once = max(n for n in range(1, at_once + 1) if layout.num_groups % n == 0)

        def fold_groups(i: Array | int, carry: None) -> None:
            groups = [i * at_once + n for n in range(at_once)]
            units = [(group, place) for group in groups for place in range(layout.group_units)]
            self._fold_units(state, units, query, visible)
            return carry

        if at_once == layout.num_groups:
            fold_groups(0, None)
        else:
            lax.fori_loop(0, layout.num_groups // at_once, fold_groups, None)

    def merged_into(self, state: _State, queries: Array, bias: Array) -> None:
        """Folds the block into the softmaxes `[1, rows, lanes]` of all units at once."""
        words = self.pages.buffers[0][self.slot].reshape(-1, LANES)
        score = _dot(queries[0], self._element(words, 0), 1)[None]
        num_rows, columns = self.shared.layout.num_rows, (1, 1, score.shape[2])
        column = lax.broadcasted_iota(jnp.int32, columns, 2)
        begin = (self.first_key - self.block * self.size) * num_rows
        end = (self.end_key - self.block * self.size) * num_rows
        is_seen = jnp.broadcast_to((column >= begin) & (column < end), score.shape)
        score = jnp.where(is_seen, self._capped(score) + bias[None], MASKED)
        weights, decay = state.weigh(score)
        product = _dot(weights[0], self._element(words, 1), 0)[None]
        state.weighted[...] = state.weighted[...] * decay + product

    def _capped(self, score: Array) -> Array:
        """Scales products of queries and keys, and bounds them, to logarithms to base 2."""
        scale, soft_cap = self.shared.scale, self.shared.soft_cap
        if soft_cap is None:
            return score * (scale * _LOG2_E)
        return (soft_cap * _LOG2_E) * jnp.tanh(score * (scale / soft_cap))

    def _fold_units(self, state: _State, units: list[Any], query: Any, visible: Array) -> None:
        """Folds consecutive units, given as (group, place in it)."""
        shared, num_rows = self.shared, state.peak.shape[1]
        numbers = [group * shared.layout.group_units + place for group, place in units]
        mine = pl.ds(numbers[0], len(units))
        scores = []
        for unit, number in zip(units, numbers, strict=True):
            score = _dot(query(number), self._tiles(unit, 0), 1)
            if shared.layout.per_word == 4:
                score *= self._scales(number, 0, num_rows)
            scores.append(score)
        score = self._capped(jnp.stack(scores))  # [units, rows, keys]
        score = jnp.where(jnp.broadcast_to(visible[None], score.shape), score, MASKED)
        weights, decay = state.weigh(score, mine)
        products = []
        for i, (unit, number) in enumerate(zip(units, numbers, strict=True)):
            weight = weights[i]
            if shared.layout.per_word == 4:
                is_seen = jnp.broadcast_to(self.is_seen, weight.shape)
                weight *= jnp.where(is_seen, self._scales(number, 1, num_rows), 0.0)
            values = self._tiles(unit, 1)
            products.append(_dot(weight, values, 0))
        weighted = state.weighted[mine] * decay
        state.weighted[mine] = weighted + jnp.stack(products)

    def _tiles(self, unit: Any, half: int) -> Array:
        """Returns the keys (0) or values (1) of a unit, `[keys, lanes]`."""
        layout, page_size = self.shared.layout, self.shared.page_size
        group, place = unit
        tiles = []
        for tile in range(place * layout.unit_tiles, (place + 1) * layout.unit_tiles):
            row, element = divmod(2 * tile + half, layout.per_word)
            row = group * layout.group_rows + row
            tokens = pl.ds(row, page_size, stride=layout.num_rows)
            words = self.pages.buffers[0][self.slot, :, tokens, :].reshape(self.size, LANES)
            tiles.append(self._element(words, element))
        return jnp.concatenate(tiles, -1)

    def _element(self, words: Array, element: int) -> Array:
        """Returns one of the elements that share words."""
        per_word, compute_dtype = self.shared.layout.per_word, self.shared.compute_dtype
        if per_word == 1:
            return words
        if per_word == 4:
            codes = (words << (24 - 8 * element)) >> 24
            return codes.astype(jnp.float32).astype(compute_dtype)
        bits = words << 16 if element == 0 else words & jnp.uint32(0xFFFF0000)
        return pltpu.bitcast(bits, jnp.float32).astype(compute_dtype)

    def _clear_unseen(self) -> None:
        """Puts zeros where no query of the work sees a key.

        What is there is NaN, perhaps, and 0 * NaN is NaN: masked scores do not save the sum over
        the values. Of codes only the scales may be NaN.
        """
        if self.shared.layout.per_word == 4:
            return
        buffer, num_rows = self.pages.buffers[0], self.shared.layout.num_rows

        def clear_page(page: Array, carry: None) -> None:
            begin = self.block * self.size + page * self.shared.page_size
            end = begin + self.shared.page_size

            @pl.when((begin < self.first_key) | (end > self.end_key))
            def _() -> None:
                rows = buffer[self.slot, page]
                row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
                is_seen = row >= (self.first_key - begin) * num_rows
                is_seen &= row < (self.end_key - begin) * num_rows
                buffer[self.slot, page] = jnp.where(is_seen, rows, jnp.zeros_like(rows))

            return carry

        begin, end = self.block * self.size, (self.block + 1) * self.size

        @pl.when((begin < self.first_key) | (end > self.end_key))
        def _() -> None:
            lax.fori_loop(0, self.pages.pages_per_block, clear_page, None)

    def _gather_scales(self) -> None:
        """Puts the scales of all pages side by side, `[K, 2, keys]`."""
        if self.shared.layout.per_word == 4:
            buffer, page_size = self.pages.buffers[1], self.shared.page_size
            pages = range(self.pages.pages_per_block)
            rows = [buffer[self.slot, page][..., :page_size] for page in pages]
            self.scales[...] = jnp.concatenate(rows, -1)

    def _scales(self, unit: Any, half: int, num_rows: int) -> Array:
        """Returns scales of a unit's keys (0) or values (1), of each row's head: `[rows, keys]`."""
        layout = self.shared.layout
        rows_per_head = self.length * self.shared.group_size
        row = lax.broadcasted_iota(jnp.int32, (num_rows, self.size), 0)
        of_rows = jnp.zeros((num_rows, self.size), jnp.float32)
        for i in range(layout.row_heads):
            head = jnp.minimum(unit * layout.unit_heads + i, layout.num_kv_heads - 1)
            of_head = jnp.broadcast_to(self.scales[head, pl.ds(half, 1), :], of_rows.shape)
            of_rows = of_head if i == 0 else jnp.where(row >= i * rows_per_head, of_head, of_rows)
        return of_rows


def _across(columns: Array, size: int) -> Array:
    """Returns values that fill 128 lanes as values that fill `size` lanes."""
    if size % LANES:
        return jnp.broadcast_to(columns[..., :1], (*columns.shape[:-1], size))
    return jnp.concatenate([columns] * (size // LANES), -1)


def _dot(left: Array, right: Array, axis: int) -> Array:
    """Multiplies `[rows, n]` by a matrix whose `axis` has that length, in float32."""
    precision = lax.Precision.HIGHEST if right.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left.astype(right.dtype),
        right,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
