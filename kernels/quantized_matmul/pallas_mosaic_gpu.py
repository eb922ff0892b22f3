"""Quantized matmul for Hopper: Pallas Mosaic GPU, tensor-core products with codes from registers.

The weight is wgmma's left operand (its codes become bfloat16, where they are exact, in registers),
x its right one (from shared memory), so that a decode batch is no wider than it must be.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import BFloat16, Float

from kernels import device, tuning
from kernels.quantized_matmul.format import LAYOUTS, QTensor, quantize_rows
from kernels.quantized_matmul.mosaic_gpu_codes import ROWS
from kernels.quantized_matmul.mosaic_gpu_kernel import run
from kernels.quantized_matmul.mosaic_gpu_plan import Config, Plan

__all__ = ["Config", "matmul", "supports"]

_USUAL_CORES = 132  # of a chip that does not say


def supports(x: Array | jax.ShapeDtypeStruct, w: QTensor) -> None:
    """Refuses other chips than Hopper, odd shapes, and codebooks for x finer than bfloat16."""
    chip = device.current("gpu")
    if chip.compute_capability is None or chip.compute_capability[0] != 9:
        raise NotImplementedError(
            f"wgmma needs compute capability 9, {chip.kind!r} has {chip.compute_capability}"
        )
    if device.interpret_mode() is True:
        raise NotImplementedError("interpreting it needs Pallas's InterpretGPUParams, not True")
    if w.layout != LAYOUTS["gpu"]:
        raise NotImplementedError(f"codes are laid out as {w.layout}: prepare them for 'gpu'")
    if w.shape[0] % ROWS or w.shape[1] % 64:
        raise NotImplementedError(f"a weight of {w.shape}: O and I must be multiples of 64")
    if w.codebook is not None and w.activations == "float" and x.dtype != jnp.bfloat16:
        raise NotImplementedError(
            f"a codebook is used in bfloat16, which is coarser than {x.dtype}"
        )


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Multiplies codes by bfloat16 x, or by three of them that add up to an x of another dtype."""
    row_scale = None
    is_exact = w.activations == "float" and x.dtype != jnp.bfloat16
    if w.activations == "int8":
        rows, row_scale = quantize_rows(x)
    else:
        rows = _split(x) if is_exact else x
    chip = device.current("gpu")
    num_cores = chip.core_count if chip.core_count > 1 else _USUAL_CORES
    config = tuning.choose(
        "quantized_matmul/pallas_mosaic_gpu",
        f"rows{rows.shape[0]}-out{w.shape[0]}-in{w.shape[1]}-{w.code}-g{w.group_size}"
        f"-{'exact' if is_exact else w.activations}",
        chip.kind,
        Config.for_call(rows.shape[0], w, num_cores, is_exact),
    )
    plan = Plan.of(config, w, rows.shape[0])
    if plan.num_parts == 1 and not is_exact and (plan.group_size or w.offset is None):
        return run(plan, rows, w, out_dtype, row_scale)[: x.shape[0]]

    sums = run(plan, rows, w)[: rows.shape[0]]
    if not plan.group_size:
        sums = sums * w.scale.astype(jnp.float32)
        if w.offset is not None:
            totals = rows.astype(jnp.float32).sum(1, keepdims=True)
            sums = sums + totals * w.offset.astype(jnp.float32)
    if row_scale is not None:
        sums = sums * row_scale
    return sums.reshape(-1, *x.shape[:1], w.shape[0]).sum(0).astype(out_dtype)


def _split(x: Float[Array, "T I"]) -> BFloat16[Array, "3*T I"]:
    """Returns the rows of three matrices that add up to x, one matrix below the other."""
    rest, parts = x.astype(jnp.float32), []
    for _ in range(3):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(jnp.float32)
    return jnp.concatenate(parts)
