"""The two kernels of quantized matmul on TPU, as functions of named references.

`few_tokens` multiplies codes and scales the result; `many_tokens` dequantizes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float32, Int32

from kernels.quantized_matmul.tpu_unpack import (
    LANES,
    WORD_BIAS,
    Ref,
    fill_table,
    from_word_order,
    gather,
    look_up,
    to_float32,
    to_word_order,
    unpack_words,
)

Refs: TypeAlias = Mapping[str, Ref]
"""Blocks in VMEM: x `[block_tokens, I]`, codes `[block_out, I]`, scale and maybe offset
`[G, block_out]`, maybe row_scale `[block_tokens, 1]`, codebook `[16]` (SMEM); out
`[block_tokens, block_out]`; and scratch, see the kernels."""


@dataclass(frozen=True)
class Plan:
    """What is static about a call's kernel.

    Attributes:
      num_columns, group_size, code: of the weight.
      by_words: 4-bit codes become bfloat16 by `unpack_words`.
      sub_out: weight rows of one dot of `few_tokens`.
    """

    num_columns: int
    group_size: int
    code: str
    by_words: bool
    sub_out: int

    @property
    def num_groups(self) -> int:
        """Scales of a weight row."""
        return self.num_columns // self.group_size

    @property
    def dots(self) -> list[slice]:
        """Columns of each dot: 128, which hold whole groups, or all if a row has one scale."""
        width = LANES if self.num_groups > 1 else self.num_columns
        starts = range(0, self.num_columns, width)
        return [slice(start, min(start + width, self.num_columns)) for start in starts]


def few_tokens(plan: Plan, refs: Refs) -> None:
    """One step of grid (rows, tokens): dots of codes, exact in x's dtype, times their scale.

    Scratch: scales `[block_out / 128, G, 128]` float32, in the order of the unpacked rows;
    shift `[G, block_out]`, what a row adds for each unit of a group's sum of x; table.
    """

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:  # what all blocks of tokens share
        _prepare_scales(plan, refs)

    block_tokens, block_out = refs["out"].shape
    x_sums = _sum_groups(refs["x"], plan) if "shift" in refs else None
    sub_out = plan.sub_out if block_out % LANES == 0 else block_out
    for start in range(0, block_out, sub_out):
        rows = slice(start, min(start + sub_out, block_out))
        sums = jnp.zeros((block_tokens, rows.stop - rows.start), jnp.float32)
        for columns in plan.dots:
            x = _spread_groups(refs["x"][:, columns], plan)
            product = _dot(x, _unpack(refs, rows, columns, plan, x.dtype))
            for index in range(x.shape[0] // block_tokens):
                own = product[index * block_tokens : (index + 1) * block_tokens]
                sums += own * _scales_of(refs, columns.start // plan.group_size + index, rows)
        if x_sums is not None:
            sums += _add_up(x_sums, refs["shift"][:, rows])
        if "row_scale" in refs:
            sums *= refs["row_scale"][...]
        if plan.by_words:
            sums = from_word_order(sums)
        refs["out"][:, rows] = sums.astype(refs["out"].dtype)


def _prepare_scales(plan: Plan, refs: Refs) -> None:
    """Fills the scratch of `few_tokens`."""
    if "table" in refs:
        fill_table(refs["table"], refs["codebook"])
    scales = to_float32(refs["scale"][...])
    offsets = to_float32(refs["offset"][...]) if "offset" in refs else None
    if plan.by_words:
        scales = to_word_order(scales)
        offsets = None if offsets is None else to_word_order(offsets)
    num_blocks, _, width = refs["scales"].shape
    for block in range(num_blocks):
        refs["scales"][block] = scales[:, block * width : (block + 1) * width]
    if "shift" in refs:
        shift = scales * -(WORD_BIAS[plan.code] if plan.by_words else 0.0)
        refs["shift"][...] = shift if offsets is None else shift + offsets


def _scales_of(refs: Refs, group: int, rows: slice) -> Float32[Array, "1 O"]:
    """Returns a group's scale of each weight row."""
    width = refs["scales"].shape[2]
    blocks = range(rows.start // width, rows.stop // width)
    return jnp.concatenate([refs["scales"][block, group : group + 1] for block in blocks], axis=1)


def _spread_groups(x: Array, plan: Plan) -> Array:
    """Returns `[groups * T, columns]`: for each group x with the others' columns zero.

    So one dot gives every group's sums; a dot as narrow as a group would leave the MXU idle.
    """
    num_groups = x.shape[1] // plan.group_size
    if num_groups == 1:
        return x
    wide = x.astype(jnp.int32 if x.dtype == jnp.int8 else jnp.float32)
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) >> (plan.group_size.bit_length() - 1)
    zero = jnp.zeros_like(wide)
    parts = [jnp.where(group == index, wide, zero) for index in range(num_groups)]
    return jnp.concatenate(parts).astype(x.dtype)


def _sum_groups(x_ref: Ref, plan: Plan) -> Float32[Array, "T G"]:
    """Returns the sum of x over each group of columns."""
    num_tokens = x_ref.shape[0]
    parts = []
    for start in range(0, plan.num_groups, LANES):
        shape = (num_tokens, min(LANES, plan.num_groups - start))
        lanes = lax.broadcasted_iota(jnp.int32, shape, 1)
        sums = jnp.zeros(shape, jnp.float32)
        for columns in plan.dots:
            first = columns.start // plan.group_size - start
            if 0 <= first < shape[1]:
                spread = _spread_groups(x_ref[:, columns], plan).astype(jnp.float32)
                totals = spread.sum(1, keepdims=True)
                for index in range(totals.shape[0] // num_tokens):
                    own = totals[index * num_tokens : (index + 1) * num_tokens]
                    sums = jnp.where(lanes == first + index, own, sums)
        parts.append(sums)
    return jnp.concatenate(parts, axis=1)


def _add_up(sums: Float32[Array, "T G"], shift: Float32[Array, "G O"]) -> Float32[Array, "T O"]:
    """Returns `sums @ shift` in float32."""
    if shift.shape[0] == 1:
        return sums * shift
    return jnp.dot(sums, shift, precision="highest", preferred_element_type=jnp.float32)


def many_tokens(plan: Plan, refs: Refs) -> None:
    """One step of grid (rows, tokens): the first block of tokens dequantizes the rows for all.

    Scratch: weight `[block_out, I]` in x's dtype; scale_columns and offset_columns
    `[block_out, G padded]` if scales multiply weights, else they multiply the result; table.
    """
    scale_in_weight = "scale_columns" in refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        if "table" in refs:
            fill_table(refs["table"], refs["codebook"])
        if scale_in_weight:
            _dequantize(plan, refs)
        else:
            everything, dtype = slice(0, plan.num_columns), refs["weight"].dtype
            refs["weight"][...] = _unpack(refs, slice(None), everything, plan, dtype)

    sums = _dot(refs["x"][...], refs["weight"][...])
    if not scale_in_weight:
        sums *= to_float32(refs["scale"][...])
    refs["out"][...] = sums.astype(refs["out"].dtype)


def _dequantize(plan: Plan, refs: Refs) -> None:
    """Writes `scale * code + offset` of a block to `weight`."""
    block_out = refs["weight"].shape[0]
    names = [name for name in ("scale", "offset") if name in refs]
    for name in names:
        refs[f"{name}_columns"][:, : plan.num_groups] = to_float32(refs[name][...]).T
    rows_at_once = LANES if block_out % LANES == 0 else block_out

    def dequantize_rows(index: Int32[Array, ""], carry: None) -> None:
        rows = pl.ds(pl.multiple_of(index * rows_at_once, rows_at_once), rows_at_once)
        for start in range(0, plan.num_columns, LANES):
            columns = slice(start, min(start + LANES, plan.num_columns))
            weight = _unpack(refs, rows, columns, plan, jnp.float32)
            weight *= _over_columns(refs["scale_columns"], rows, columns, plan)
            if "offset" in names:
                weight += _over_columns(refs["offset_columns"], rows, columns, plan)
            refs["weight"][rows, columns] = weight.astype(refs["weight"].dtype)

    lax.fori_loop(0, block_out // rows_at_once, dequantize_rows, None)


def _over_columns(
    values_ref: Ref, rows: Any, columns: slice, plan: Plan
) -> Float32[Array, "O columns"]:
    """Returns each row's value of each column's group, from `[O, G]`, for at most 128 columns."""
    first = columns.start // plan.group_size
    chunk = first // LANES * LANES
    values = values_ref[rows, chunk : chunk + LANES]
    width = columns.stop - columns.start
    if plan.num_groups == 1 or plan.group_size >= LANES:
        shape = (values.shape[0], width)
        return jnp.broadcast_to(values[:, first - chunk : first - chunk + 1], shape)
    lanes = lax.broadcasted_iota(jnp.int32, values.shape, 1)
    group = (lanes >> (plan.group_size.bit_length() - 1)) + (first - chunk)
    return gather(values, group, axis=1)[:, :width]


def _unpack(refs: Refs, rows: Any, columns: slice, plan: Plan, dtype: DTypeLike) -> Array:
    """Returns codes as numbers of a dtype, or what the codebook has for them."""
    codes = refs["codes"][rows, columns]
    if "table" in refs:
        return look_up(refs["table"], codes.astype(jnp.int32)).astype(dtype)
    return unpack_words(codes, plan.code) if plan.by_words else codes.astype(dtype)


def _dot(x: Array, weight: Array) -> Float32[Array, "T O"]:
    """Returns `x @ weight.T`; sums are int32 or float32."""
    integer = x.dtype == jnp.int8
    product = lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if integer else jnp.float32,
    )
    return product.astype(jnp.float32) if integer else product
