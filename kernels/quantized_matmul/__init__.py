"""`x @ dequantize(w).T` for weights that stay quantized: int8, fp8 and 4-bit codes in groups.

Implementations: `reference` (the contract), `xla` (any backend), `cpu` (C++), and Pallas kernels.
To add one, write its module with `supports(x, w)` and `matmul(x, w, out_dtype)` and name it in
`IMPLEMENTATIONS`; `matmul_first(x, w, num_tokens, out_dtype)` too where fewer rows take less time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int32

from kernels import dispatch
from kernels.quantized_matmul.format import (
    FORMATS,
    LAYOUTS,
    QFormat,
    QTensor,
    dequantize,
    prepare,
)
from kernels.quantized_matmul.rounding import quantize

__all__ = [
    "FORMATS",
    "IMPLEMENTATIONS",
    "LAYOUTS",
    "QFormat",
    "QTensor",
    "choose",
    "dequantize",
    "matmul",
    "prepare",
    "quantize",
]

IMPLEMENTATIONS = {
    "cpu": ("cpu", "xla", "reference"),
    "gpu": ("pallas_mosaic_gpu", "pallas_triton", "xla", "reference"),
    "tpu": ("pallas_tpu", "xla", "reference"),
}


def matmul(
    x: Float[Array, "T I"],
    w: QTensor,
    *,
    platform: str,
    implementation: str | None = None,
    out_dtype: DTypeLike | None = None,
    num_tokens: Int32[Array, ""] | None = None,
) -> Float[Array, "T O"]:
    """Returns `x @ dequantize(w).T`, in `out_dtype` or x's dtype, rounded once.

    Weights are dequantized as they are read. With `w.activations == "float"` products are of x's
    dtype (a bfloat16 x meets weights rounded to bfloat16); with "int8" each row of x is rounded to
    `round(127 x / max|x|)` first and products are exact. Sums are float32 (int32 within a group).

    Args:
      x: activations, in the columns' logical order.
      w: the weight, best in `prepare`'s layout for the platform.
      platform: `cpu`, `gpu` or `tpu`, where this will run.
      implementation: the only one to consider; None for the best that supports the call.
      out_dtype: of the result.
      num_tokens: how many of x's first rows are wanted; None for all. The others' results are
        unspecified.

    Raises:
      ValueError: x's columns are not w's; `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    if x.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} does not fit a weight [O, I] of shape {w.shape}")
    if w.perm is not None:
        x = jnp.take(x, w.perm, axis=1)
    module = choose(x, w, platform=platform, implementation=implementation).module
    matmul_first = getattr(module, "matmul_first", None)
    if num_tokens is not None and matmul_first is not None:
        return matmul_first(x, w, num_tokens, out_dtype or x.dtype)
    return module.matmul(x, w, out_dtype or x.dtype)


def choose(
    x: Array | jax.ShapeDtypeStruct,
    w: QTensor,
    *,
    platform: str,
    implementation: str | None = None,
) -> dispatch.Choice:
    """Returns what `matmul` runs for such arrays (shapes are enough), with each refusal's reason.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call.
    """
    return dispatch.choose(
        __name__,
        IMPLEMENTATIONS,
        platform=platform,
        requested=implementation,
        supports=lambda module: module.supports(x, w),
    )
