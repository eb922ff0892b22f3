"""Writes tokens into a TPU's cache in place: copies of runs of slots, straight into their page.

A page's scales of a head are one row of lanes, of which no copy can change a single one: they are
read, changed and written back, many pages at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from kernels import device
from kernels.paged_attention.cache import (
    KVCache,
    QuantizedKV,
    encode_rows,
    holding,
    quantize_kv,
    values_of,
)
from kernels.paged_attention.tpu_layout import LANES
from kernels.paged_attention.tpu_pages import in_hbm

Ref = Any
_TILE = 256  # tokens that are in VMEM at once
_COPY = 16  # tokens of the longest copy
_SLOTS = 8  # pages whose scales are in VMEM at once
_AHEAD = 4  # of them, those still to change


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Writes all tokens but those of page 0; see `kernels.paged_attention.write`."""
    values = values_of(kv)
    held, page_size = values.words, values.words.shape[1]
    if isinstance(kv, QuantizedKV):
        codes, scales = quantize_kv(new_kv)
        words = encode_rows(codes, values)
    else:
        words, scales = encode_rows(new_kv, values), None
    num_tokens = words.shape[0]
    tile = min(_TILE, num_tokens)
    num_tiles = -(-num_tokens // tile)
    padding = num_tiles * tile - num_tokens
    runs = _runs(jnp.pad(slot_mapping, (0, padding)), page_size, tile)
    words = jnp.pad(words, ((0, padding), (0, 0), (0, 0), (0, 0)))
    block = pl.BlockSpec((tile, *words.shape[1:]), lambda i, *_: (i, 0, 0, 0))
    uncopied = pl.BlockSpec(memory_space=pltpu.HBM)
    # The same bytes in other shapes: XLA cannot keep a program's own argument in HBM (`in_hbm`).
    arrays, caches, in_specs = [words], [held.reshape(-1, *held.shape[2:])], [block]
    scratch = [pltpu.SemaphoreType.DMA]
    if scales is not None and isinstance(kv, QuantizedKV):
        # Tokens last, as in the cache; a page's worth of them may begin at any lane.
        lanes = num_tiles * tile + kv.scales.shape[-1]
        lanes = -(-lanes // LANES) * LANES + LANES
        scales = jnp.moveaxis(scales, 0, 2)
        arrays.append(jnp.pad(scales, ((0, 0), (0, 0), (0, lanes - num_tokens))))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
        caches.append(kv.scales.reshape(-1, *kv.scales.shape[2:]))
        scratch += [
            pltpu.VMEM((_SLOTS, *kv.scales.shape[1:]), kv.scales.dtype),
            pltpu.SemaphoreType.DMA((_SLOTS,)),
            pltpu.SemaphoreType.DMA((_SLOTS,)),
        ]
    first = len(runs) + len(arrays)
    written = pl.pallas_call(
        partial(_write, page_size, tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(runs),
            grid=(num_tiles,),
            in_specs=[*in_specs, *[uncopied] * len(caches)],
            out_specs=[uncopied] * len(caches),
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={first + i: i for i in range(len(caches))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), has_side_effects=True, disable_bounds_checks=True
        ),
        cost_estimate=pl.CostEstimate(
            flops=0, bytes_accessed=2 * words.size * 4, transcendentals=0
        ),
        interpret=device.interpret_mode(),
        name="paged_attention_write",
    )(*runs, *arrays, *in_hbm(*caches))
    values = holding(written[0].reshape(held.shape), values)
    if not isinstance(kv, QuantizedKV):
        return values
    return QuantizedKV(values, written[1].reshape(kv.scales.shape))


class _Runs(NamedTuple):
    """Consecutive tokens of a tile with consecutive slots of a page, as arrays to prefetch.

    Attributes:
      starts: `[tiles + 1]` each tile's first run, and the end.
      token, slot, length: `[T]` of each run: its first token and slot, and how many.
      is_serial: `[tiles]` whether a tile has runs near each other that share a page.
    """

    starts: Array
    token: Array
    slot: Array
    length: Array
    is_serial: Array


def _runs(slots: Int[Array, "T"], page_size: int, tile: int) -> _Runs:
    """Returns the runs of tokens that are not in page 0; XLA makes them once for all layers."""
    num_tokens = slots.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    is_kept = slots >= page_size
    follows = (slots == jnp.roll(slots, 1) + 1) & (slots % page_size != 0) & (token % tile != 0)
    is_start = is_kept & ~follows
    # Where the tokens after each one stop following each other.
    stops = jnp.where(follows & is_kept, num_tokens, token)
    following = lax.cummin(stops, reverse=True)
    end = jnp.append(following[1:], jnp.int32(num_tokens))
    count = jnp.cumsum(is_start, dtype=jnp.int32)
    start = jnp.searchsorted(count, token + 1, side="left", method="compare_all").astype(jnp.int32)
    place = jnp.minimum(start, num_tokens - 1)
    page = jnp.where(start < num_tokens, slots[place] // page_size, -1 - token)
    shares = jnp.zeros(num_tokens, bool)
    for distance in range(1, min(_SLOTS, num_tokens)):
        same = (page == jnp.roll(page, distance)) & (token >= distance)
        shares |= same & (start // tile == jnp.roll(start, distance) // tile)
    num_tiles = num_tokens // tile
    of_tile = jnp.arange(num_tiles, dtype=jnp.int32)
    is_serial = (shares[None] & (start[None] // tile == of_tile[:, None])).any(1)
    starts = (start[None] < tile * jnp.arange(num_tiles + 1, dtype=jnp.int32)[:, None]).sum(1)
    return _Runs(
        starts.astype(jnp.int32),
        start,
        slots[place],
        (end - token)[place],
        is_serial.astype(jnp.int32),
    )


def _write(page_size: int, tile: int, *refs: Ref) -> None:
    """One tile: starts the copies of all runs, changes the scales meanwhile, and waits."""
    runs, others = _Runs(*refs[:5]), refs[5:]
    step = pl.program_id(0)
    begin, end = runs.starts[step], runs.starts[step + 1]
    if len(others) == 4:
        words, _, cache, semaphore = others
    else:
        words, new_scales, _, _, cache, cached_scales, semaphore, *scratch = others

    def copies(action: str) -> None:
        def of_run(run: Array, carry: None) -> None:
            slot, length = runs.slot[run], runs.length[run]
            first = runs.token[run] - step * tile

            def copy(size: int, base: Array | int, count: Array) -> None:
                def of_piece(i: Array, carry: None) -> None:
                    at = base + i * size
                    piece = pltpu.make_async_copy(
                        words.at[pl.ds(first + at, size)],
                        cache.at[pl.ds(slot + at, size)],
                        semaphore,
                    )
                    getattr(piece, action)()
                    return carry

                lax.fori_loop(0, count, of_piece, None)

            size = min(_COPY, page_size, tile)
            num_long = lax.div(length, jnp.int32(size))
            copy(size, 0, num_long)
            copy(1, num_long * size, lax.rem(length, jnp.int32(size)))
            return carry

        lax.fori_loop(begin, end, of_run, None)

    copies("start")
    if len(others) > 4:
        _write_scales(page_size, runs, step, new_scales, cached_scales, *scratch)
    copies("wait")


def _write_scales(
    page_size: int,
    runs: _Runs,
    step: Array,
    new: Ref,
    cache: Ref,
    buffer: Ref,
    reads: Ref,
    writes: Ref,
) -> None:
    """Changes the scales of each run's slots, run after run, those ahead on their way already.

    Runs near each other that share a page must not overlap: then each waits for the one before.
    """
    begin, end = runs.starts[step], runs.starts[step + 1]
    is_serial = runs.is_serial[step] != 0
    ahead = jnp.where(is_serial, 0, _AHEAD)
    lag = jnp.where(is_serial, 1, _SLOTS)
    num_heads = buffer.shape[1]

    def read(run: Array) -> Any:
        slot = lax.rem(run, jnp.int32(_SLOTS))
        page = lax.div(runs.slot[run], jnp.int32(page_size))
        return pltpu.make_async_copy(
            cache.at[pl.ds(page * num_heads, num_heads)], buffer.at[slot], reads.at[slot]
        )

    def write_back(run: Array) -> Any:
        slot = lax.rem(run, jnp.int32(_SLOTS))
        page = lax.div(runs.slot[run], jnp.int32(page_size))
        return pltpu.make_async_copy(
            buffer.at[slot], cache.at[pl.ds(page * num_heads, num_heads)], writes.at[slot]
        )

    def change(run: Array) -> None:
        slot = lax.rem(run, jnp.int32(_SLOTS))
        offset, length = lax.rem(runs.slot[run], jnp.int32(page_size)), runs.length[run]
        token, lanes = runs.token[run], buffer.shape[-1]
        first = lax.div(token, jnp.int32(LANES)) * LANES
        window = new[:, :, pl.ds(pl.multiple_of(first, LANES), lanes + LANES)]
        shift = lax.rem(offset - (token - first) + (lanes + LANES), lanes + LANES)
        moved = pltpu.roll(window, shift, 2)[:, :, :lanes]
        lane = lax.broadcasted_iota(jnp.int32, moved.shape, 2)
        is_new = (lane >= offset) & (lane < offset + length)
        buffer[slot] = jnp.where(is_new, moved, buffer[slot])

    def of_run(run: Array, carry: None) -> None:
        settled = run + ahead - lag
        pl.when(settled >= begin)(lambda: write_back(settled).wait())
        pl.when(run + ahead < end)(lambda: read(run + ahead).start())
        read(run).wait()
        change(run)
        write_back(run).start()
        return carry

    def each(lower: Array, upper: Array, act: Any) -> None:
        def step(run: Array, carry: None) -> None:
            act(run)
            return carry

        lax.fori_loop(lower, upper, step, None)

    each(begin, jnp.minimum(begin + ahead, end), lambda run: read(run).start())
    each(begin, end, lambda run: of_run(run, None))
    each(jnp.maximum(end + ahead - lag, begin), end, lambda run: write_back(run).wait())
