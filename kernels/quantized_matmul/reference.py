"""Quantized matmul as its definition reads: dequantize to float32, multiply. Slow, for tests."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from kernels.quantized_matmul.format import QTensor, dequantize, quantize_rows


def supports(x: Array, w: QTensor) -> None:
    """Refuses nothing."""


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Returns `x @ dequantize(w).T` with every product and sum in float32."""
    rows = x.astype(jnp.float32)
    if w.activations == "int8":
        codes, row_scale = quantize_rows(rows)
        rows = codes.astype(jnp.float32) * row_scale
    product = jnp.einsum("TI,OI->TO", rows, dequantize(w), precision="highest")
    return product.astype(out_dtype)
