"""Quantized matmul by Pallas' Triton lowering: NVIDIA GPUs from Ampere on (A100, A10G, L4, 4090).

A block computes `[block_o, block_t]` of the transposed result, so that weights, decoded in
registers, are the tensor cores' left operand and a decode batch may be as narrow as 8. Decode
steps split I over blocks; XLA adds the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from operator import add
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float

from kernels import device, tuning
from kernels._compat import import_pallas_triton
from kernels.quantized_matmul import triton_codes
from kernels.quantized_matmul.format import LAYOUTS, QTensor, quantize_rows
from kernels.quantized_matmul.triton_codes import RUN
from kernels.quantized_matmul.triton_config import Config

__all__ = ["Config", "matmul", "supports"]

plgpu: Any = import_pallas_triton()

Index: TypeAlias = Any  # a Python int or a traced int32

_NAME = "quantized_matmul/pallas_triton"
_OLDEST_CAPABILITY = (8, 0)


def supports(x: Array | jax.ShapeDtypeStruct, w: QTensor) -> None:
    """Refuses GPUs before Ampere, layouts that are not the GPU's, and x that is not of floats."""
    if plgpu is None:
        raise NotImplementedError("this version of jax has no Triton lowering of Pallas")
    capability = device.current("gpu").compute_capability
    if capability is not None and capability < _OLDEST_CAPABILITY:
        raise NotImplementedError(f"compute capability {capability}: needs (8, 0) or later")
    if w.layout != LAYOUTS["gpu"]:
        raise NotImplementedError(f"the weight is laid out as {w.layout}: prepare(w, 'gpu') first")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"x is {x.dtype}: needs float32, bfloat16 or float16")


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Multiplies codes, or weights rounded to x's dtype, by x on tensor cores; sums in float32."""
    on = device.current("gpu")
    config = tuning.choose(_NAME, _call_key(x, w), on.kind, Config.for_call(x, w, on))
    if w.activations == "float":
        return _product(x, w, config, out_dtype)
    codes, row_scale = quantize_rows(x)
    if w.code != "int8" or w.group_size < 32:
        codes = codes.astype(x.dtype)  # no integer product fits; floats hold 255 steps exactly
    return (_product(codes, w, config, jnp.float32) * row_scale).astype(out_dtype)


def _call_key(x: Array, w: QTensor) -> str:
    """Names what a tuned config depends on."""
    num_rows, num_columns = w.shape
    tokens = pl.next_power_of_2(x.shape[0])
    return f"{tokens}x{num_columns}x{num_rows}-{x.dtype}-{w.code}-g{w.group_size}-{w.activations}"


def _product(x: Array, w: QTensor, config: Config, out_dtype: DTypeLike) -> Float[Array, "T O"]:
    """Runs the kernel and adds up the parts of a split I, in float32."""
    plan = _Plan.of(x, w, config)
    refs = {"x": x, "q": w.qvalue, "scale": w.scale}
    if w.is_4bit:
        words = w.qvalue.reshape(plan.num_rows, -1, 4)
        refs |= {
            "x": triton_codes.in_word_order(x, plan.chunk),
            "q": lax.bitcast_convert_type(words, jnp.uint32),
        }
    elif w.code == "fp8":
        refs["q"] = lax.bitcast_convert_type(w.qvalue, jnp.uint8)
    if w.offset is not None:
        refs["offset"] = w.offset
    if w.codebook is not None:
        refs["codebook"] = w.codebook.astype(x.dtype)
    blocks = pl.cdiv(plan.num_rows, config.block_o), pl.cdiv(plan.num_tokens, config.block_t)
    shape = (config.split_i, plan.num_tokens, plan.num_rows)
    parts = pl.pallas_call(
        partial(_kernel, plan=plan),
        grid=(*blocks, config.split_i),
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype if config.split_i == 1 else jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=device.interpret_mode(),
        name="quantized_matmul",
    )(refs)
    return parts[0] if config.split_i == 1 else parts.sum(0).astype(out_dtype)


@dataclass(frozen=True)
class _Plan:
    """What is known of a call while it is traced."""

    config: Config
    dtype: Any  # of x: int8 where integers are multiplied
    code: str
    num_tokens: int
    num_rows: int
    num_columns: int
    group_size: int
    has_offset: bool
    has_codebook: bool

    @classmethod
    def of(cls, x: Array, w: QTensor, config: Config) -> _Plan:
        has = (w.offset is not None, w.codebook is not None)
        return cls(config, x.dtype, w.code, x.shape[0], *w.shape, w.group_size, *has)

    @property
    def is_4bit(self) -> bool:
        return self.code in ("int4", "uint4")

    @property
    def whole_row(self) -> bool:
        return self.group_size == self.num_columns

    @property
    def block_i(self) -> int:
        divisor = self.num_columns & -self.num_columns
        return min(self.config.block_i, divisor) if self.is_4bit else self.config.block_i

    @property
    def num_steps(self) -> int:
        return pl.cdiv(self.num_columns, self.block_i)

    @property
    def groups_per_step(self) -> int:
        return 1 if self.whole_row else max(1, self.block_i // self.group_size)

    @property
    def chunk(self) -> int:
        """Columns whose codes are loaded together, of one group if groups allow it."""
        chunk = self.block_i if self.whole_row else min(self.block_i, self.group_size)
        return max(chunk, RUN) if self.is_4bit else chunk

    @property
    def load_width(self) -> int:
        """Bytes of 8-bit codes, or words of 4-bit ones, loaded together for one group."""
        if not self.is_4bit:
            return self.chunk
        return min(self.chunk // 8, self.group_size // 4)  # a group of 16 has 4 words in each half

    @property
    def scale_result(self) -> bool:
        """Whether a row's one scale multiplies its finished sum."""
        return self.whole_row and not self.has_offset and (self.scale_sums or not self.is_4bit)

    @property
    def scale_sums(self) -> bool:
        return self.config.scale_sums or self.dtype == jnp.int8

    @property
    def code_base(self) -> int:
        """By how much decoded numbers exceed the codes they stand for."""
        if not self.is_4bit:
            return 0
        return triton_codes.code_base(self.code, self.dtype, self.has_codebook)


def _kernel(refs: dict[str, Any], out_ref: Any, *, plan: _Plan) -> None:
    """Writes one block of one part of the result."""
    config = plan.config
    row, token = pl.program_id(0) * config.block_o, pl.program_id(1) * config.block_t
    block, part = _Block(plan, refs, row, token), pl.program_id(2)
    steps = pl.cdiv(plan.num_steps, config.split_i)
    first, last = part * steps, (part + 1) * steps
    if plan.num_steps % config.split_i:
        last = jnp.minimum(last, plan.num_steps)

    def ahead(step: Index) -> tuple[Any, Any]:
        """Loads what Triton would not load steps ahead, as no product takes it as it is."""
        step = jnp.minimum(step, plan.num_steps - 1)
        return (
            block.scales(step) if plan.scale_sums and not plan.scale_result else None,
            block.stored(step) if plan.has_codebook else None,
        )

    def add_step(step: Array, carry: Any) -> Any:
        total, (scales, stored) = carry
        following = ahead(step + 1)
        stored = block.stored(step) if stored is None else stored
        if plan.scale_result:
            for _, sums, _ in block.sums(step, stored):
                total += sums
        elif plan.scale_sums:
            for group, sums, sums_of_x in block.sums(step, stored):
                scale, offset = block.columns(scales[group])
                total += sums.astype(jnp.float32) * scale
                if sums_of_x is not None and offset is not None:
                    total += sums_of_x.astype(jnp.float32) * offset
        else:
            scales = block.scales(step)
            for group, codes, x, _ in block.pieces(step, stored):
                scale, offset = block.columns(scales[group])
                weight = codes.astype(jnp.float32) * scale
                if offset is not None:
                    weight += offset
                total += _dot(weight.astype(plan.dtype), x)
        return total, following

    shape = (config.block_o, config.block_t)
    zeros = jnp.zeros(shape, _sum_dtype(plan.dtype) if plan.scale_result else jnp.float32)
    total, _ = lax.fori_loop(first, last, add_step, (zeros, ahead(first)))
    if plan.scale_result:
        [scales] = block.scales(jnp.int32(0))
        total = total.astype(jnp.float32) * block.columns(scales)[0]
    block.store(out_ref, part, total.astype(out_ref.dtype))


@dataclass(frozen=True)
class _Block:
    """What one block of the grid reads and writes, at `row` of the weight and `token` of x."""

    plan: _Plan
    refs: dict[str, Any]
    row: Index
    token: Index

    def sums(
        self, step: Index, stored: tuple[Array, ...]
    ) -> Iterator[tuple[int, Array, Array | None]]:
        """Yields per group of a step its number, codes times x, and x's sums if offsets ask.

        Tensor cores make x's sums, `[block_o, block_t]` at once: no registers are exchanged.
        """
        plan = self.plan
        for group, pieces in groupby(self.pieces(step, stored), key=lambda piece: piece[0]):
            sums: list[Array] = []
            sums_of_x: list[Array] = []
            for _, codes, x, values in pieces:
                sums.append(_dot(codes, x))
                if plan.has_offset:
                    sums_of_x.append(_dot(triton_codes.constant(1.0, values, plan.dtype), x))
                elif plan.code_base:
                    base = triton_codes.constant(-float(plan.code_base), values, plan.dtype)
                    sums.append(_dot(base, x))
            yield group, reduce(add, sums), reduce(add, sums_of_x) if sums_of_x else None

    def stored(self, step: Index) -> tuple[Array, ...]:
        """Loads what a step takes of the weight, `load_width` bytes or words at a time."""
        scale = 8 if self.plan.is_4bit else 1
        start = step * (self.plan.block_i // scale)
        width = self.plan.load_width
        return tuple(
            self._load("q", start + place, width)
            for place in range(0, self.plan.block_i // scale, width)
        )

    def pieces(
        self, step: Index, stored: tuple[Array, ...]
    ) -> Iterator[tuple[int, Array, Array, Array]]:
        """Yields group, numbers `[block_o, K]`, x `[block_t, K]` and the stored, group by group."""
        plan = self.plan
        size = plan.block_i // plan.groups_per_step
        pieces = self._pieces_of_nibbles if plan.is_4bit else self._pieces_of_bytes
        found = sorted(pieces(step, stored), key=lambda piece: piece[0] // size)
        for column, codes, x, values in found:
            yield column // size, codes, x, values

    def _pieces_of_bytes(
        self, step: Index, stored: tuple[Array, ...]
    ) -> Iterator[tuple[int, Array, Array, Array]]:
        plan = self.plan
        for column, values in zip(range(0, plan.block_i, plan.chunk), stored, strict=True):
            x = self._load("x", step * plan.block_i + column, plan.chunk)
            yield column, triton_codes.from_bytes(values, plan.code, plan.dtype), x, values

    def _pieces_of_nibbles(
        self, step: Index, stored: tuple[Array, ...]
    ) -> Iterator[tuple[int, Array, Array, Array]]:
        plan = self.plan
        width = plan.load_width
        for word, words in zip(range(0, plan.block_i // 8, width), stored, strict=True):
            chunk, at = divmod(word, plan.chunk // 8)
            for nibble in range(4):
                codes = triton_codes.from_nibbles(
                    words, nibble, plan.code, plan.dtype, self.refs.get("codebook")
                )
                place = chunk * plan.chunk + nibble * (plan.chunk // 4) + 2 * at
                x = self._load("x", step * plan.block_i + place, 2 * width)
                column = chunk * plan.chunk + nibble % 2 * (RUN // 2) + 4 * at
                yield column, codes, x, words

    def scales(self, step: Index) -> tuple[tuple[Array, Array | None], ...]:
        """Loads scale and offset `[block_o]` of each group that a step has columns of."""
        plan = self.plan
        size = plan.config.block_o
        mask = None
        if plan.num_rows % size:
            mask = self.row + lax.iota(jnp.int32, size) < plan.num_rows
        found = []
        for number in range(plan.groups_per_step):
            group: Index = jnp.int32(0)
            if not plan.whole_row:
                group = (step * plan.block_i + number * plan.group_size) // plan.group_size
            if plan.num_columns % plan.block_i:
                group = jnp.minimum(group, plan.num_columns // plan.group_size - 1)
            at = (group, pl.ds(self.row, size))
            scale = plgpu.load(self.refs["scale"].at[at], mask=mask)
            offset = plgpu.load(self.refs["offset"].at[at], mask=mask) if plan.has_offset else None
            found.append((scale, offset))
        return tuple(found)

    def columns(self, scales: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        """Returns `[block_o, 1]` factor and term of decoded numbers, None where no term is due.

        Without offsets, that is where `sums` has dealt with the numbers' base already.
        """
        plan = self.plan
        scale = scales[0].astype(jnp.float32)[:, None]
        offset = None if scales[1] is None else scales[1].astype(jnp.float32)[:, None]
        if plan.code_base and (plan.has_offset or not plan.scale_sums):
            base = np.float32(plan.code_base) * scale
            offset = -base if offset is None else offset - base
        return scale * np.float32(triton_codes.FP8_UNIT if plan.code == "fp8" else 1.0), offset

    def store(self, out_ref: Any, part: Index, total: Array) -> None:
        """Writes the block's result `[block_o, block_t]`, transposed, to its part."""
        plan = self.plan
        begins, shape = (self.token, self.row), (plan.config.block_t, plan.config.block_o)
        at = out_ref.at[part, pl.ds(begins[0], shape[0]), pl.ds(begins[1], shape[1])]
        plgpu.store(at, total.T, mask=_mask(begins, shape, (plan.num_tokens, plan.num_rows)))

    def _load(self, name: str, column: Index, width: int) -> Array:
        """Loads columns of the block's rows of `q` or x; zeros beyond their end."""
        plan, ref = self.plan, self.refs[name]
        row, size = (
            (self.row, plan.config.block_o) if name == "q" else (self.token, plan.config.block_t)
        )
        limits = (ref.shape[0], None if plan.num_columns % plan.block_i == 0 else ref.shape[1])
        mask = _mask((row, column), (size, width), limits)
        other = None if mask is None else ref.dtype.type(0)
        return plgpu.load(ref.at[pl.ds(row, size), pl.ds(column, width)], mask=mask, other=other)


def _mask(
    begins: tuple[Index, Index], shape: tuple[int, int], limits: tuple[int, int | None]
) -> Array | None:
    """Returns what of a block lies within the limits, None if all blocks do."""
    mask = None
    for axis, (begin, size, limit) in enumerate(zip(begins, shape, limits, strict=True)):
        if limit is not None and (limit % size or axis == 1):
            inside = begin + lax.iota(jnp.int32, size) < limit
            inside = lax.broadcast_in_dim(inside, shape, (axis,))
            mask = inside if mask is None else mask & inside
    return mask


def _dot(codes: Array, x: Array) -> Array:
    """Returns `codes @ x.T` in float32, or int32 of integers."""
    return lax.dot_general(
        codes,
        x,
        (((1,), (1,)), ((), ())),
        precision="highest" if x.dtype == jnp.float32 else None,
        preferred_element_type=_sum_dtype(x.dtype),
    )


def _sum_dtype(dtype: Any) -> Any:
    return jnp.int32 if dtype == jnp.int8 else jnp.float32
