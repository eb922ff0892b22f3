"""Weights of every format, by hand, and the C++ product with them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels.quantized_matmul import LAYOUTS, QFormat, QTensor, cpu
from kernels.quantized_matmul.format import NF4

# Between them every decoder, group size and type of scale.
FORMATS = {
    "int8": QFormat("int8"),
    "int8-g16": QFormat("int8", 16, scale_dtype="float16"),
    "int8-offset": QFormat("int8", 32, has_offset=True, scale_dtype="bfloat16"),
    "fp8": QFormat("fp8"),
    "fp8-g128": QFormat("fp8", 128),
    "int4-row": QFormat("int4"),
    "int4-g16": QFormat("int4", 16, scale_dtype="bfloat16"),
    "int4-g32": QFormat("int4", 32, scale_dtype="float16"),
    "uint4-g16": QFormat("uint4", 16, has_offset=True),
    "uint4-g128": QFormat("uint4", 128, has_offset=True, scale_dtype="float16"),
    "nf4": QFormat("uint4", 64, codebook=NF4),
}
FIVE_BITS = {
    "five-bits": QFormat("int8", 32, scale_dtype="float16"),
    "five-bits-g16": QFormat("int8", 16),
    "five-bits-offset": QFormat("int8", 32, has_offset=True),
}
"""Of codes that are known to fit five bits."""


def random_weight(fmt: QFormat, rows: int, columns: int) -> QTensor:
    """Any codes with any scales, in numpy: nothing to compile."""
    rng = np.random.default_rng(rows)
    group = fmt.group_size or columns
    floats = rng.standard_normal((2, rows, columns // group), np.float32)
    scale, offset = jnp.asarray(floats.astype(fmt.scale_dtype))
    codes = rng.integers(0, 256, (rows, columns // (2 if "int4" in fmt.code else 1)), np.uint8)
    if fmt.code == "fp8":
        codes[codes % 128 == 127] = 0  # NaN has a test of its own
    dtype = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}.get(fmt.code, np.uint8)
    return QTensor(
        jnp.asarray(codes.view(dtype)),
        scale,
        offset if fmt.has_offset else None,
        jnp.asarray(fmt.codebook, jnp.float32) if fmt.codebook else None,
        code=fmt.code,
        group_size=group,
        layout=LAYOUTS["cpu"],
    )


def random_five_bits(fmt: QFormat, rows: int, columns: int) -> QTensor:
    """The same with codes that fit five bits."""
    w = random_weight(fmt, rows, columns)
    codes = (w.qvalue & 31) - (0 if fmt.has_offset else 16)
    return dataclasses.replace(w, qvalue=codes, fits_five_bits=True)


def weight_by_hand(w: QTensor) -> np.ndarray:
    codes = np.asarray(w.qvalue)
    if w.is_4bit:
        chunks = codes.reshape(len(codes), -1, 1, 16)
        codes = np.concatenate([chunks % 16, chunks // 16], 2).reshape(len(codes), -1)
        table = np.arange(16, dtype=np.float32) - (8 if w.code == "int4" else 0)
        codes = (table if w.codebook is None else np.asarray(w.codebook))[codes]
    groups = codes.astype(np.float32).reshape(*w.scale.shape, w.group_size)
    weight = groups * np.asarray(w.scale, np.float32)[..., None]
    if w.offset is not None:
        weight = weight + np.asarray(w.offset, np.float32)[..., None]
    return weight.reshape(w.shape)


def random_x(tokens: int, columns: int) -> jax.Array:
    rng = np.random.default_rng(tokens)
    return jnp.asarray(rng.standard_normal((tokens, columns), np.float32))


def product(x, w, instruction_set=None) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        if instruction_set:
            patch.setenv("JAXINFER_CPU_ISA", instruction_set)
        return np.asarray(jax.jit(lambda x, w: cpu.matmul(x, w, jnp.float32))(x, w))
