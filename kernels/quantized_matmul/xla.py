"""Quantized matmul in plain XLA, on any backend: the dequantized matrix may be materialized.

Only whole-row scales with `int8` activations avoid that: codes are multiplied as integers.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32

from kernels.quantized_matmul.format import (
    CANONICAL,
    QTensor,
    decode,
    dequantize,
    prepare,
    quantize_rows,
)

_ROWS_BY_COLUMNS = (((1,), (1,)), ((), ()))


def supports(x: Array, w: QTensor) -> None:
    """Refuses nothing."""


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Multiplies in x's dtype, sums in float32; see `kernels.quantized_matmul`."""
    return _product(x, w).astype(out_dtype)


def _product(x: Float[Array, "T I"], w: QTensor) -> Float32[Array, "T O"]:
    if x.shape[0] == 1:
        # XLA:CPU multiplies one row of anything but float32 in a loop 10 to 50 times slower.
        return _product(jnp.repeat(x, 2, axis=0), w)[:1]
    # XLA:CPU has no bfloat16 product of an x in the layout that a gather of its columns leaves.
    x = lax.optimization_barrier(x)
    if w.activations == "float":
        precision = "highest" if x.dtype == jnp.float32 else None
        weight = dequantize(w).astype(x.dtype)
        return lax.dot_general(
            x, weight, _ROWS_BY_COLUMNS, precision=precision, preferred_element_type=jnp.float32
        )
    codes, row_scale = quantize_rows(x)
    if w.code == "int8" and w.group_size == w.shape[1] and w.offset is None:
        sums = lax.dot_general(codes, decode(w), _ROWS_BY_COLUMNS, preferred_element_type=jnp.int32)
        scale = prepare(w, CANONICAL).scale.astype(jnp.float32)[:, 0]
        return sums.astype(jnp.float32) * row_scale * scale[None]
    product = jnp.einsum("TI,OI->TO", codes.astype(jnp.float32), dequantize(w), precision="highest")
    return product * row_scale
