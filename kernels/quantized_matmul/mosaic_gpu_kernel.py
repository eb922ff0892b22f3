"""The Mosaic GPU kernel of quantized matmul.

A block does consecutive steps (64 to 256 columns of an output tile each), over the ends of tiles:
one warpgroup copies what steps read to a ring of shared memory, the others multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float, Float32

from kernels._compat import load_as, store_as_is, transpose_ref
from kernels.quantized_matmul import mosaic_gpu_codes as codes
from kernels.quantized_matmul.format import QTensor
from kernels.quantized_matmul.mosaic_gpu_codes import ROWS
from kernels.quantized_matmul.mosaic_gpu_plan import Plan

Ref: TypeAlias = Any
Stage: TypeAlias = dict[str, Ref]  # a step's operands in shared memory

_REGISTERS = 65536  # of a multiprocessor
_COPY_REGISTERS = 24  # of a thread that copies


@dataclass(frozen=True)
class _Operand:
    """An array of which each step copies a block to shared memory.

    Attributes:
      origin: the block's first row and column, by the step's tiles of O, of T and of I.
      swizzle: bytes of a row that are stored together, as wgmma wants them; 0 for plain rows.
    """

    array: Array
    block: tuple[int, int]
    origin: Callable[[Any, Any, Any], tuple[Any, Any]]
    swizzle: int = 0

    def buffer(self, num_stages: int) -> Any:
        """Returns the shared memory for some blocks."""
        transforms: tuple[Any, ...] = ()
        if self.swizzle:
            tile = (8, self.swizzle // self.array.dtype.itemsize)
            transforms = plgpu.TilingTransform(tile), plgpu.SwizzleTransform(self.swizzle)
        return plgpu.SMEM((num_stages, *self.block), self.array.dtype, transforms=transforms)


def _operands(plan: Plan, rows: Array, w: QTensor) -> dict[str, _Operand]:
    """Returns what steps read: codes and x, scales and offsets, and what offsets multiply."""
    out, tokens, tile_in = plan.tile_out, plan.config.tile_tokens, plan.config.tile_in
    rows = jnp.pad(rows, ((0, -rows.shape[0] % tokens), (0, 0)))
    x = rows if plan.integers else codes.reorder(rows.astype(jnp.bfloat16), plan.kind)
    row_bytes = tile_in // 2 if w.is_4bit else tile_in
    operands = {
        "codes": _Operand(
            w.qvalue,
            (out, row_bytes),
            lambda o, t, i: (o * out, i * row_bytes),
            min(plan.width if plan.integers else row_bytes, 128),
        ),
        "x": _Operand(
            x,
            (tokens, tile_in),
            lambda o, t, i: (t * tokens, i * tile_in),
            min(plan.width * x.dtype.itemsize, 128),
        ),
    }
    if not plan.group_size:
        return operands
    num_groups = tile_in // plan.group_size

    def of_groups(array: Array) -> _Operand:
        return _Operand(
            array, (num_groups, out), lambda o, t, i: (i * tile_in // w.group_size, o * out)
        )

    operands["scale"] = of_groups(w.scale)
    if plan.has_offset:
        operands["offset"] = of_groups(w.offset)
    if plan.has_offset and not plan.scale_codes:
        # Rows of 128 bytes or more can be copied.
        columns = max(tokens, 32)
        totals = rows.astype(jnp.float32).reshape(rows.shape[0], -1, plan.group_size).sum(2)
        totals = totals.reshape(-1, tokens, totals.shape[1])
        totals = jnp.pad(totals, ((0, 0), (0, columns - tokens), (0, 0)))
        operands["totals"] = _Operand(
            totals.reshape(-1, totals.shape[2]).T,
            (num_groups, columns),
            lambda o, t, i: (i * num_groups, t * columns),
        )
    return operands


def run(
    plan: Plan,
    rows: Array,
    w: QTensor,
    out_dtype: DTypeLike | None = None,
    row_scale: Float32[Array, "T 1"] | None = None,
) -> Float[Array, "R O"]:
    """Returns `rows @ codes.T`, scaled if scales are per group; its last rows are padding.

    If `out_dtype` is given (and tiles are in one part), scales of rows are applied too.
    """
    config = plan.config
    operands = _operands(plan, rows, w)
    num_rows = operands["x"].array.shape[0]
    extra = {"constants": codes.constants(w.codebook)}
    if out_dtype is not None and not plan.group_size:
        extra["out_scale"] = w.scale.astype(jnp.float32).reshape(-1)
    if row_scale is not None:
        extra["row_scale"] = jnp.pad(row_scale[:, 0], (0, num_rows - rows.shape[0]))
    full_and_empty = [
        plgpu.Barrier(num_arrivals=arrivals, num_barriers=config.num_stages)
        for arrivals in (len(operands), config.num_warpgroups)
    ]
    # The interpreter's wgmma takes its left operand from shared memory only.
    staged = (config.num_warpgroups, ROWS, plan.width)
    staging = [plgpu.SMEM(staged, jnp.bfloat16)] if plan.interpret else []
    kernel = plgpu.kernel(
        partial(_kernel, plan, operands, tuple(extra)),
        out_type=jax.ShapeDtypeStruct(
            (plan.num_parts, num_rows, plan.num_out), jnp.dtype(out_dtype or jnp.float32)
        ),
        scratch_types=[
            *(operand.buffer(config.num_stages) for operand in operands.values()),
            *full_and_empty,
            *staging,
        ],
        grid=(-(-math.prod(plan.tiles) * plan.steps // config.steps_per_block),),
        grid_names=("block",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({"interpret": plan.interpret} if plan.interpret else {}),
    )
    parts = kernel(*(operand.array for operand in operands.values()), *extra.values())
    if (plan.parts < plan.num_parts).any():
        # Blocks that a tile does not have wrote nothing.
        written = np.arange(plan.num_parts)[:, None] < plan.parts
        written = written.reshape(-1, plan.tiles[0], 1, plan.tiles[1], 1).transpose(0, 3, 2, 1, 4)
        tiled = parts.reshape(-1, plan.tiles[1], config.tile_tokens, plan.tiles[0], plan.tile_out)
        parts = jnp.where(written, tiled, 0.0).reshape(parts.shape)
    return parts[0] if plan.num_parts == 1 else parts.sum(0)


def _kernel(
    plan: Plan, operands: dict[str, _Operand], extra_names: tuple[str, ...], *refs: Ref
) -> None:
    """Does one block's steps: a warpgroup copies, the others multiply."""
    config, steps = plan.config, plan.steps
    count = len(operands)
    inputs, refs = refs[:count], refs[count:]
    extra = dict(zip(extra_names, refs, strict=False))
    out, *scratch = refs[len(extra) :]
    buffers, (full, empty, *staging) = scratch[:count], scratch[count:]
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    first = block * config.steps_per_block
    last = jnp.minimum(first + config.steps_per_block, math.prod(plan.tiles) * steps)

    @pl.when(warpgroup == config.num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

        def copy(step: Array, _: None) -> None:
            slot = lax.rem(step - first, config.num_stages)
            pl.when(step - first >= config.num_stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
            tile = step // steps
            place = tile // plan.tiles[1], lax.rem(tile, plan.tiles[1]), lax.rem(step, steps)
            for operand, source, buffer in zip(operands.values(), inputs, buffers, strict=True):
                row, column = operand.origin(*place)
                block = pl.ds(row, operand.block[0]), pl.ds(column, operand.block[1])
                plgpu.copy_gmem_to_smem(source.at[block], buffer.at[slot], full.at[slot])

        lax.fori_loop(first, last, copy, None)

    @pl.when(warpgroup < config.num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(multiplying_registers(config.num_warpgroups), action="increase")
        constants = [extra["constants"][i] for i in range(extra["constants"].shape[0])]
        multiplier = _Multiplier(plan, warpgroup, constants, staging[0] if staging else None)

        def multiply(tile: Array, _: None) -> None:
            begin, end = jnp.maximum(first, tile * steps), jnp.minimum(last, (tile + 1) * steps)

            def for_each_stage(step_with: Callable[[Stage, Any], Any], carry: Any) -> Any:
                def step(index: Array, carry: Any) -> Any:
                    slot = lax.rem(index - first, config.num_stages)
                    plgpu.barrier_wait(full.at[slot])
                    stage = {
                        name: buffer.at[slot]
                        for name, buffer in zip(operands, buffers, strict=True)
                    }
                    carry = step_with(stage, carry)
                    plgpu.barrier_arrive(empty.at[slot])
                    return carry

                return lax.fori_loop(begin, end, step, carry)

            sums = multiplier.tile(for_each_stage)
            tile_out, tile_tokens = tile // plan.tiles[1], lax.rem(tile, plan.tiles[1])
            columns = pl.ds(tile_out * plan.tile_out + warpgroup * ROWS, ROWS)
            tokens = pl.ds(tile_tokens * config.tile_tokens, config.tile_tokens)
            for name, place, axis in (("out_scale", columns, 0), ("row_scale", tokens, 1)):
                if name in extra:
                    # Loads from device memory are not of the kind called optimized.
                    sums = sums * _spread(extra[name].at[place], sums.shape, axis, optimized=False)
            part = block - tile * steps // config.steps_per_block
            sums = plgpu.layout_cast(sums.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            # Eight neighbours in a warp are all that store next to each other: of 16-bit numbers
            # that is half of what device memory writes at once, which jax 0.12 wants to be told.
            store_as_is(transpose_ref(out.at[part, tokens, columns]), sums)

        lax.fori_loop(first // steps, pl.cdiv(last, steps), multiply, None)


def multiplying_registers(num_warpgroups: int) -> int:
    """Returns how many registers a thread that multiplies may take.

    They are the block's, which starts with as many for each thread as there are, in eights: to ask
    for one more would be to wait for ever.
    """
    each = min(_REGISTERS // (128 * (num_warpgroups + 1)) // 8 * 8, 248)
    rest = each * (num_warpgroups + 1) - _COPY_REGISTERS
    return min(rest // num_warpgroups // 8 * 8, 240)


@dataclass(frozen=True)
class _Multiplier:
    """A warpgroup's part in a block's tiles: 64 rows of the weight."""

    plan: Plan
    warpgroup: Array
    constants: list[Array]
    staging: Ref | None

    def tile(self, for_each_stage: Callable[..., Any]) -> Float32[Array, "64 tokens"]:
        """Returns the sums over all stages of a tile."""
        shape = (ROWS, self.plan.config.tile_tokens)
        accumulator = plgpu.ACC(  # type: ignore[attr-defined]
            shape, jnp.int32 if self.plan.integers else jnp.float32
        )
        if not self.plan.group_size or self.plan.scale_codes:

            def scope(sums: Ref) -> Array:
                def step(stage: Stage, _: None) -> None:
                    self.add(sums, stage, self.words(stage), 0, self.plan.config.tile_in)
                    plgpu.wgmma_wait(0)

                for_each_stage(step, None)
                return sums[...]

            return pl.run_scoped(scope, accumulator).astype(jnp.float32)

        def step(stage: Stage, sums: Array) -> Array:
            words = self.words(stage)
            for group in range(self.plan.config.tile_in // self.plan.group_size):
                begin = group * self.plan.group_size

                def scope(products: Ref, begin: int = begin) -> Array:
                    self.add(products, stage, words, begin, begin + self.plan.group_size)
                    return products[...]

                products = pl.run_scoped(scope, accumulator).astype(jnp.float32)
                sums = sums + products * self.of_rows(stage["scale"], group, shape)
                if self.plan.has_offset:
                    totals = _spread(stage["totals"].at[group, pl.ds(0, shape[1])], shape, 1)
                    sums = sums + totals * self.of_rows(stage["offset"], group, shape)
            return sums

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return for_each_stage(step, zeros)

    def words(self, stage: Stage) -> Array | None:
        """Returns this warpgroup's codes in registers, if they pass through them."""
        if self.plan.integers:
            return None
        return codes.load_words(stage["codes"].at[self.rows], bool(self.plan.interpret))

    @property
    def rows(self) -> Any:
        """This warpgroup's rows of a block's tile."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def of_rows(self, ref: Ref, group: int, shape: tuple[int, ...]) -> Array:
        """Returns a group's scale or offset of every row."""
        return _spread(ref.at[group, self.rows], shape, 0)

    def add(self, sums: Ref, stage: Stage, words: Array | None, begin: int, end: int) -> None:
        """Adds some columns' products."""
        for start in range(begin, end, self.plan.width):
            columns = pl.ds(start, self.plan.width)
            x = transpose_ref(stage["x"].at[:, columns])
            if words is None:
                plgpu.wgmma(sums, stage["codes"].at[self.rows, columns], x)
                continue
            numbers = self.numbers(stage, words, start)
            if self.staging is None:
                plgpu.wgmma(sums, numbers, x)
            else:
                self.staging[self.warpgroup] = numbers
                plgpu.wgmma(sums, self.staging.at[self.warpgroup], x)

    def numbers(self, stage: Stage, words: Array, start: int) -> BFloat16[Array, "64 width"]:
        """Returns codes, or weights, from a column on."""
        plan = self.plan
        numbers = codes.decode(
            words, plan.kind, start, plan.width, self.constants, bool(plan.interpret)
        )
        if not plan.scale_codes:
            return numbers
        group = start // plan.group_size
        weights = numbers.astype(jnp.float32) * self.of_rows(stage["scale"], group, numbers.shape)
        if plan.has_offset:
            weights = weights + self.of_rows(stage["offset"], group, numbers.shape)
        return weights.astype(jnp.bfloat16)


def _spread(
    ref: Ref, shape: tuple[int, ...], axis: int, **options: bool
) -> Float32[Array, "64 columns"]:
    """Reads a vector that goes along an axis of `shape`, the same in the other."""
    values = load_as(ref, plgpu.Layout.WGMMA.reduce(1 - axis), **options).astype(jnp.float32)
    return lax.broadcast_in_dim(values, shape, [axis])
