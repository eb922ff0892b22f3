"""Quantized weights: codes in groups along the input axis, with a scale and maybe an offset each.

The one place that knows how codes are packed and how each platform wants them laid out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32, UInt8

from kernels.quantized_matmul import row_blocks

Leaf: TypeAlias = Any  # an Array, or whatever a transformation puts in its place in the pytree
Code: TypeAlias = Literal["int8", "fp8", "int4", "uint4"]
Activations: TypeAlias = Literal["float", "int8"]
Rounding: TypeAlias = Literal["absmax", "ggml", "hqq"]

GROUP_SIZES = (16, 32, 64, 128)
"""Weights per scale along I; the whole row, I, is allowed as well."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""The 16 values of NormalFloat4 (arXiv 2305.14314, appendix E)."""

E2M1 = tuple(s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""The values of 4-bit floats with two bits of exponent, by their bits: what MXFP4 scales."""

_SIGNED_BIAS = 8  # an int4 code -8..7 is stored as 0..15


@dataclass(frozen=True)
class Layout:
    """How a platform wants the arrays of a QTensor.

    Attributes:
      nibble_chunk: columns whose codes share `nibble_chunk / 2` bytes: byte j of a chunk holds the
        code of the chunk's column j in its low half, of column `j + nibble_chunk / 2` in its high.
        2 is the canonical order: even columns low. I is a multiple of it.
      native_int4: 4-bit codes are a `jnp.int4` or `jnp.uint4` array `[O, I]` instead.
      groups_first: scale and offset are `[I / group_size, O]` instead of `[O, I / group_size]`.
      row_block: rows whose arrays are interleaved, in arrays of the same shape: of a block first
        four bytes of each row's codes, second and third exchanged, then the next four of each; of
        scale and offset each group's of all rows. For C++ kernels: see cpu_blocks.h.
      five_bits: codes of a weight that `fits_five_bits` take so many, uint8 `[O, I * 5 / 8]`; only
        in blocks of rows: see cpu_blocks_five_bits.h.
    """

    nibble_chunk: int = 2
    native_int4: bool = False
    groups_first: bool = False
    row_block: int = 1
    five_bits: bool = False


CANONICAL = Layout()
LAYOUTS = {
    "cpu": Layout(nibble_chunk=32),
    "gpu": Layout(nibble_chunk=64, groups_first=True),
    "tpu": Layout(native_int4=True, groups_first=True),
}
CPU_BLOCKS = Layout(nibble_chunk=32, row_block=16)
"""Where a CPU multiplies bfloat16 numbers: see `cpu.best_layout`."""
CPU_FIVE_BITS = dataclasses.replace(CPU_BLOCKS, five_bits=True)


@dataclass(frozen=True)
class QFormat:
    """What weights are quantized to.

    Attributes:
      code: `int8` (-127..127), `fp8` (float8_e4m3fn), `int4` (-8..7), `uint4` (0..15).
      group_size: weights along I that share a scale, one of GROUP_SIZES; None for a whole row.
      has_offset: `w = scale * q + offset` with an offset per group, for `int8` and `uint4` codes;
        else `w = scale * q`.
      codebook: 16 values for `uint4` codes: `w = scale * codebook[q]`.
      activations: `float` multiplies by x as it is; `int8` rounds each row of x to 255 steps.
      rounding: how codes are chosen: by each group's range, bit for bit as ggml does, or by
        half-quadratic quantization. Only `quantize` asks.
      scale_dtype: of scales and offsets.
    """

    code: Code
    group_size: int | None = None
    has_offset: bool = False
    codebook: tuple[float, ...] | None = None
    activations: Activations = "float"
    rounding: Rounding = "absmax"
    scale_dtype: Literal["float32", "float16", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size {self.group_size}: pass one of {GROUP_SIZES} or None")
        if self.code == "uint4" and self.has_offset == (self.codebook is not None):
            raise ValueError("uint4 codes need either an offset or a codebook")
        if self.code != "uint4" and self.codebook is not None:
            raise ValueError(f"only uint4 codes have a codebook, not {self.code}")
        if self.code in ("int4", "fp8") and self.has_offset:
            raise ValueError(f"only int8 and uint4 codes have an offset, not {self.code}")
        if self.codebook is not None and len(self.codebook) != 16:
            raise ValueError(f"a codebook has 16 values, not {len(self.codebook)}")
        if self.rounding == "ggml" and (self.code not in ("int8", "int4") or self.has_offset):
            raise ValueError(f"ggml rounding is for int8 and int4 without offset, not {self.code}")
        if self.rounding == "hqq" and not self.has_offset:
            raise ValueError("hqq rounding optimizes an offset: set has_offset")


FORMATS = {
    "int8": QFormat("int8"),
    "int8-g128": QFormat("int8", 128),
    "w8a8": QFormat("int8", activations="int8"),
    "fp8": QFormat("fp8"),
    "int4": QFormat("int4", 128),
    "int4-g32": QFormat("int4", 32),
    "uint4-g32": QFormat("uint4", 32, has_offset=True),
    "nf4": QFormat("uint4", 64, codebook=NF4),
}
"""Formats by the names that flags and specs use."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A logical matrix `[O, I]`, kept as codes: a pytree whose leaves are its arrays.

    With q the code as a number and g its group, in float32:

        w = scale[g] * q + offset[g]      or      w = scale[g] * codebook[q]

    Invariants: `I % group_size == 0`; offset only with `int8` and `uint4`, codebook only with
    `uint4`, never both; scale and offset have one shape and keep their source's exact values
    (float16, bfloat16 or float32).

    Attributes:
      qvalue: int8 or float8_e4m3fn `[O, I]`; 4-bit codes two a byte, uint8 `[O, I / 2]`, or as
        `layout` says. An `int4` code q is stored as q + 8.
      scale, offset: `[O, I / group_size]`, or as `layout` says; offset may be None.
      codebook: float32 `[16]` or None.
      perm: int32 `[I]` or None: column i multiplies `x[:, perm[i]]` (act-order checkpoints).
      code, group_size, activations: see QFormat; group_size is never None here.
      fits_five_bits: int8 codes are known to lie in -16..15, or with an offset in 0..31.
      layout: where the codes are.
    """

    qvalue: Leaf
    scale: Leaf
    offset: Leaf = None
    codebook: Leaf = None
    perm: Leaf = None
    code: Code = field(default="int8", metadata={"static": True})
    group_size: int = field(default=0, metadata={"static": True})
    activations: Activations = field(default="float", metadata={"static": True})
    fits_five_bits: bool = field(default=False, metadata={"static": True})
    layout: Layout = field(default=CANONICAL, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (O, I)."""
        rows, columns = self.qvalue.shape
        if self.layout.five_bits:
            return rows, columns * 8 // 5
        return rows, columns * (2 if self.qvalue.dtype == jnp.uint8 else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes its arrays take; 4-bit codes count half a byte, also where they take more."""
        rows, columns = self.shape
        others = (self.scale, self.offset, self.codebook, self.perm)
        code_bits = 4 if self.is_4bit else 5 if self.layout.five_bits else 8
        code_bytes = rows * columns * code_bits // 8
        return code_bytes + sum(a.size * a.dtype.itemsize for a in others if a is not None)

    @property
    def is_4bit(self) -> bool:
        """Whether codes have four bits."""
        return self.code in ("int4", "uint4")


def dequantize(w: QTensor) -> Float32[Array, "O I"]:
    """Returns the matrix a QTensor of any layout stands for; columns stay in the stored order."""
    w = _without_blocks(w)
    codes = decode(w)
    if w.codebook is not None:
        codes = jnp.asarray(w.codebook)[codes.astype(jnp.int32)]
    groups = codes.astype(jnp.float32).reshape(w.shape[0], -1, w.group_size)
    weight = groups * _per_row(w, w.scale)[..., None]
    if w.offset is not None:
        weight = weight + _per_row(w, w.offset)[..., None]
    return weight.reshape(w.shape)


def take_rows(
    w: QTensor, ids: Int32[Array, " T"], dtype: jax.typing.DTypeLike
) -> Float[Array, "T I"]:
    """Returns rows of the matrix, their columns in logical order, dequantizing only those.

    Args:
      w: a weight of any layout.
      ids: rows; those outside 0..O-1 count as the nearest that exists.
      dtype: of the result, rounded to once: products and sums are float32.
    """
    if w.layout.row_block > 1:
        rows = _rows_of_blocks(w, jnp.clip(ids, 0, w.shape[0] - 1))
        return take_rows(rows, jnp.arange(len(ids), dtype=jnp.int32), dtype)
    axis = 1 if w.layout.groups_first else 0
    rows = dataclasses.replace(
        w,
        qvalue=_take(w.qvalue, ids, 0),
        scale=_take(w.scale, ids, axis),
        offset=None if w.offset is None else _take(w.offset, ids, axis),
    )
    taken = dequantize(rows)
    if w.perm is not None:
        taken = taken.at[:, w.perm].set(taken, unique_indices=True)
    return taken.astype(dtype)


def decode(w: QTensor) -> Array:
    """Returns a QTensor's codes `[O, I]` in any layout: int8 numbers, or float8 as they are."""
    qvalue = jnp.asarray(_without_blocks(w).qvalue)
    if not w.is_4bit:
        return qvalue
    if w.layout.native_int4:
        return qvalue.astype(jnp.int8)
    codes = unpack_nibbles(qvalue, w.layout.nibble_chunk).astype(jnp.int8)
    return codes - jnp.int8(_SIGNED_BIAS) if w.code == "int4" else codes


def encode(codes: Float32[Array, "O I"], code: Code) -> Array:
    """Returns code numbers as a canonical QTensor's `qvalue`: what `decode` undoes."""
    if code == "fp8":
        return codes.astype(jnp.float8_e4m3fn)
    if code == "int8":
        return codes.astype(jnp.int8)
    return pack_nibbles((codes + (_SIGNED_BIAS if code == "int4" else 0)).astype(jnp.uint8))


def prepare(w: QTensor, layout: Layout | str) -> QTensor:
    """Returns the same matrix in another layout, or in that of a platform ("cpu", "gpu", "tpu").

    Leaves may be numpy arrays; those that need no change stay what they are.

    Raises:
      ValueError: 4-bit codes whose I is not a multiple of the layout's chunk, or a weight that is
        not whole blocks of rows.
    """
    if isinstance(layout, str):
        layout = LAYOUTS[layout]
    if layout == w.layout:
        return w
    if w.layout.row_block > 1:
        return prepare(_without_blocks(w), layout)
    if layout.row_block > 1:
        return _in_blocks(prepare(w, _rows_of(layout)), layout)
    if w.is_4bit and w.shape[1] % layout.nibble_chunk:
        raise ValueError(
            f"a weight {w.shape} of 4-bit codes has no layout in chunks of {layout.nibble_chunk} "
            f"columns: I must be a multiple of {layout.nibble_chunk}; use a format of 8 bits"
        )
    qvalue = w.qvalue
    if w.is_4bit and _nibbles_of(layout) != _nibbles_of(w.layout):
        qvalue = _rearrange(w, layout)
    scale, offset = w.scale, w.offset
    if layout.groups_first != w.layout.groups_first:
        scale, offset = scale.T, None if offset is None else offset.T
    return dataclasses.replace(w, qvalue=qvalue, scale=scale, offset=offset, layout=layout)


def pack_nibbles(codes: UInt8[Array, "O I"], chunk: int = 2) -> UInt8[Array, "O half"]:
    """Packs codes 0..15 two a byte in the order of `Layout.nibble_chunk`."""
    num_rows, num_columns = codes.shape
    if num_columns % chunk:
        raise ValueError(f"{num_columns} columns of 4-bit codes are not a multiple of {chunk}")
    halves = codes.reshape(num_rows, -1, 2, chunk // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(num_rows, -1)


def unpack_nibbles(packed: UInt8[Array, "O half"], chunk: int = 2) -> UInt8[Array, "O I"]:
    """Undoes `pack_nibbles`."""
    halves = packed.reshape(packed.shape[0], -1, 1, chunk // 2)
    return jnp.concatenate([halves & 0xF, halves >> 4], axis=2).reshape(packed.shape[0], -1)


def quantize_rows(x: Float[Array, "T I"]) -> tuple[Array, Float32[Array, "T 1"]]:
    """Returns each row as int8 codes and its scale, `max|x| / 127`: what `int8` activations are."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(1, keepdims=True) / 127.0
    return jnp.round(divide_groups(x, scale[:, 0])).astype(jnp.int8), scale


def _rearrange(w: QTensor, layout: Layout) -> Array:
    """Moves 4-bit codes from one layout to another."""
    codes = decode(w)
    if layout.native_int4:
        return codes.astype(jnp.int4 if w.code == "int4" else jnp.uint4)
    bias = jnp.int8(_SIGNED_BIAS if w.code == "int4" else 0)
    return pack_nibbles((codes + bias).astype(jnp.uint8), layout.nibble_chunk)


def _in_blocks(w: QTensor, layout: Layout) -> QTensor:
    rows, columns = w.shape
    if rows % layout.row_block or columns % row_blocks.COLUMNS or w.code == "fp8":
        raise ValueError(
            f"a weight {w.shape} of {w.code} codes has no layout in blocks of {layout.row_block} "
            f"rows: needs whole blocks, {row_blocks.COLUMNS} columns or multiples, and integers"
        )
    if layout.five_bits and not w.fits_five_bits:
        raise ValueError(
            f"a weight {w.shape} of {w.code} codes that need not fit five bits has no layout of so "
            "many: use CPU_BLOCKS"
        )
    offset = None if w.offset is None else row_blocks.interleave_groups(w.offset, layout.row_block)
    qvalue = row_blocks.interleave_codes(w.qvalue, layout.row_block)
    if layout.five_bits:
        qvalue = row_blocks.pack_five_bits(qvalue + _five_bit_bias(w))
    return dataclasses.replace(
        w,
        qvalue=qvalue,
        scale=row_blocks.interleave_groups(w.scale, layout.row_block),
        offset=offset,
        layout=layout,
    )


def _without_blocks(w: QTensor) -> QTensor:
    if w.layout.row_block == 1:
        return w
    return _rows_of_blocks(w, jnp.arange(w.shape[0], dtype=jnp.int32))


def _rows_of_blocks(w: QTensor, rows: Int32[Array, " T"]) -> QTensor:
    """Returns some rows of a weight in blocks, as a weight that is not."""
    size = w.layout.row_block
    if w.layout.five_bits:
        numbers = row_blocks.take_five_bits(w.qvalue, rows, size)
        qvalue = numbers.astype(jnp.int8) - _five_bit_bias(w)
    else:
        qvalue = row_blocks.take_codes(w.qvalue, rows, size)
    return dataclasses.replace(
        w,
        qvalue=qvalue,
        scale=row_blocks.take_groups(w.scale, rows, size),
        offset=None if w.offset is None else row_blocks.take_groups(w.offset, rows, size),
        layout=_rows_of(w.layout),
    )


def _rows_of(layout: Layout) -> Layout:
    """Returns a layout in blocks without them."""
    return dataclasses.replace(layout, row_block=1, five_bits=False)


def _five_bit_bias(w: QTensor) -> np.int8:
    """What makes codes of five bits numbers from 0 on."""
    return np.int8(16 if w.offset is None else 0)


def _nibbles_of(layout: Layout) -> tuple[int, bool]:
    """What of a layout says where 4-bit codes are."""
    return layout.nibble_chunk, layout.native_int4


def _per_row(w: QTensor, of_groups: Leaf) -> Float32[Array, "O groups"]:
    """Returns scales or offsets of any layout with a weight's rows first."""
    rows_first = of_groups.T if w.layout.groups_first else of_groups
    return jnp.asarray(rows_first).astype(jnp.float32)


def _take(array: Leaf, ids: Array, axis: int) -> Array:
    """Returns slices of an array, which may be numpy's."""
    return jnp.take(jnp.asarray(array), ids, axis=axis, mode="clip")


def divide_groups(values: Array, scale: Array) -> Float32[Array, "..."]:
    """Returns `values / scale[..., None]`, zero where the scale is zero."""
    scale = scale.astype(jnp.float32)[..., None]
    return jnp.where(scale == 0, 0.0, values / jnp.where(scale == 0, 1.0, scale))
