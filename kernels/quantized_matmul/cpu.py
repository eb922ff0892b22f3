"""Quantized matmul on CPUs by C++ loops behind `jax.ffi`: weights are decoded in registers.

The sources beside this file are built by `kernels.native_build`, when the package is installed or
by `python -m kernels.native_build`. Without the library, or on columns that are not a multiple of
16, this refuses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from kernels import native
from kernels.quantized_matmul.format import (
    CPU_BLOCKS,
    CPU_FIVE_BITS,
    GROUP_SIZES,
    LAYOUTS,
    Layout,
    QTensor,
    quantize_rows,
)

__all__ = [
    "best_layout",
    "is_available",
    "matmul",
    "matmul_first",
    "stored_code",
    "supports",
    "unavailable",
]

# The version is that of the handlers in cpu.cc.
_TARGET = "jaxinfer_quantized_matmul_v5"
# Those that multiply weights in blocks of rows, and of them those that do it faster.
_BLOCK_SETS = {"amx", "avx512bf16", "avx512"}
_BFLOAT16_SETS = {"amx", "avx512bf16"}


def is_available() -> bool:
    """Whether the library is there and this version of jax takes it."""
    return unavailable() is None


def unavailable() -> str | None:
    """Returns why the library cannot be used, or None."""
    return native.unavailable(_TARGET)


def supports(x: Array | jax.ShapeDtypeStruct, w: QTensor) -> None:
    """Refuses without the library, other layouts, and columns that do not fill vectors."""
    if reason := unavailable():
        raise NotImplementedError(reason)
    if w.layout not in (LAYOUTS["cpu"], CPU_BLOCKS, CPU_FIVE_BITS):
        raise NotImplementedError(f"the weight is laid out as {w.layout}: prepare(w, 'cpu') first")
    if w.layout.row_block > 1 and not _BLOCK_SETS & set(native.usable_instruction_sets()):
        raise NotImplementedError("weights in blocks of rows need AVX-512")
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"x is {x.dtype}: needs float32, bfloat16 or float16")
    multiple = 32 if w.is_4bit else 16
    columns, group = w.shape[1], w.group_size
    if columns % multiple or (group != 16 and group % multiple):
        raise NotImplementedError(
            f"{columns} columns in groups of {group}: {w.code} codes need multiples of {multiple}"
        )


def best_layout(w: QTensor) -> Layout:
    """Returns where this machine wants a weight's codes: in blocks of rows where it has a use."""
    rows = LAYOUTS["cpu"]
    if not is_available() or not _BFLOAT16_SETS & set(native.usable_instruction_sets()):
        return rows
    num_rows, columns = w.shape
    fits = num_rows % CPU_BLOCKS.row_block == 0 and columns % 32 == 0 and w.code != "fp8"
    has_groups = w.group_size in GROUP_SIZES or w.group_size == columns
    if not (fits and has_groups and w.activations == "float"):
        return rows
    return CPU_FIVE_BITS if w.fits_five_bits else CPU_BLOCKS


def stored_code(w: QTensor) -> str:
    """Returns the name by which handlers know a weight's codes."""
    if not w.layout.five_bits:
        return w.code
    return "int5" if w.offset is None else "uint5"


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Multiplies and sums in float32; a row's result has the same bits whatever the other rows.

    A bfloat16 x meets weights in blocks as bfloat16 numbers, their codes unrounded.
    """
    return matmul_first(x, w, jnp.int32(x.shape[0]), out_dtype)


def matmul_first(
    x: Float[Array, "T I"],
    w: QTensor,
    num_tokens: Int32[Array, ""],
    out_dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T O"]:
    """Multiplies x's first rows, with the bits of `matmul`; the others' results are zeros."""
    if w.activations == "float":
        if x.dtype != jnp.bfloat16 or w.layout.row_block == 1:
            x = x.astype(jnp.float32)
        return _product(x, w, num_tokens).astype(out_dtype)
    codes, row_scale = quantize_rows(x)
    return (_product(codes.astype(jnp.float32), w, num_tokens) * row_scale).astype(out_dtype)


def _product(
    x: Float[Array, "T I"], w: QTensor, num_tokens: Int32[Array, ""]
) -> Float32[Array, "T O"]:
    none = np.zeros((0,), np.float32)
    call = jax.ffi.ffi_call(
        native.handler(_TARGET), jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), jnp.float32)
    )
    offset = none if w.offset is None else w.offset
    codebook = none if w.codebook is None else w.codebook
    row_block = np.int64(w.layout.row_block)
    operands = (x, w.qvalue, w.scale, offset, codebook, num_tokens)
    return call(*operands, code=stored_code(w), row_block=row_block)
