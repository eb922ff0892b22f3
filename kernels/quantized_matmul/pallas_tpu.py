"""Quantized matmul on TPU: codes stream through VMEM once and are unpacked next to the MXU.

Chooses the kernel of `tpu_kernels` and its blocks (`Config`), and lays out the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Float

from kernels import device, tuning
from kernels.quantized_matmul.format import LAYOUTS, QTensor, quantize_rows
from kernels.quantized_matmul.tpu_kernels import Plan, few_tokens, many_tokens
from kernels.quantized_matmul.tpu_unpack import LANES, as_loadable

Operand: TypeAlias = tuple[Array, tuple[int, int] | None, Callable[[Any, Any], tuple[Any, Any]]]
"""An array, its block (None: whole, in SMEM) and the block's index at a grid step."""

_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Config:
    """Block sizes, and where scales are applied.

    Attributes:
      block_out: weight rows of a grid step, a multiple of 128 (or all of them).
      block_tokens: tokens of a grid step, a multiple of 32 (or all of them).
      sub_out: weight rows of one dot in a step of few tokens, a multiple of 128.
      dequantize: scales multiply weights, once for all tokens, instead of each group's dot. Only
        with `float` activations.
    """

    block_out: int
    block_tokens: int
    sub_out: int = 256
    dequantize: bool = False

    @staticmethod
    def for_call(num_tokens: int, w: QTensor, x_dtype: DTypeLike, chip: str) -> Config:
        """Returns sizes that fit in VMEM and keep the pipeline fed, legal for any call."""
        num_rows, num_columns = w.shape
        groups_per_dot = max(1, LANES // w.group_size)
        # Tokens times groups of a dot's columns, up to which the MXU outruns the unpacking.
        most = 128 if _is_v5e(chip) else 256
        dequantize = w.activations == "float" and num_tokens * groups_per_dot > most
        if dequantize or w.group_size == num_columns:
            # An exact dot of float32 splits its operands into three, in VMEM as well.
            row_bytes = num_columns * {1: 1, 2: 2, 4: 16}[jnp.dtype(x_dtype).itemsize]
            block_tokens = max(32, min(512, 8 * _MEGABYTE // row_bytes // 32 * 32))
        else:
            block_tokens = max(32, most // groups_per_dot)
        # A step of few tokens unrolls over its codes: 2 M of them are about 2000 bundles.
        block_out = 512 if num_columns <= 4096 and num_rows >= 8192 else 256
        return Config(
            block_out=min(block_out if num_columns <= 16384 else 128, num_rows),
            block_tokens=min(block_tokens, num_tokens),
            sub_out=128 if _is_v5e(chip) and groups_per_dot == 1 else 256,
            dequantize=dequantize,
        )


def supports(x: Array, w: QTensor) -> None:
    """Refuses other dtypes of x than float32 and bfloat16, and weights not laid out for TPU."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"x is {x.dtype}, not float32 or bfloat16")
    if w.layout != LAYOUTS["tpu"]:
        raise NotImplementedError('the weight is not laid out for TPU: prepare(w, "tpu")')


def matmul(
    x: Float[Array, "T I"], w: QTensor, out_dtype: DTypeLike = jnp.float32
) -> Float[Array, "T O"]:
    """Returns `x @ dequantize(w).T` in `out_dtype`; see `kernels.quantized_matmul`."""
    num_tokens = x.shape[0]
    x = jnp.pad(x, ((0, -num_tokens % 8), (0, 0)))
    row_scale = None
    if w.activations == "int8":
        x, row_scale = quantize_rows(x)
        x = x.astype(_exact_dtype(w))
    chip = device.current("tpu").kind
    codebook = "-codebook" if w.codebook is not None else ""
    call = f"{w.code}{codebook}-g{w.group_size}-{w.activations}-{x.dtype}"
    config = tuning.choose(
        "quantized_matmul/pallas_tpu",
        f"{call} T{x.shape[0]} O{w.shape[0]} I{w.shape[1]}",
        chip,
        Config.for_call(x.shape[0], w, x.dtype, chip),
    )
    return _call(x, w, row_scale, config, chip, out_dtype)[:num_tokens]


def _is_v5e(chip: str) -> bool:
    """Whether the MXU is 128 wide and the vector unit has no bfloat16."""
    return "v5 lite" in chip


def _exact_dtype(w: QTensor) -> DTypeLike:
    """Returns a dtype for x's codes in which their products with w's are exact."""
    if w.codebook is not None:
        return jnp.float32
    return jnp.bfloat16 if w.code == "fp8" else jnp.int8


def _call(
    x: Array,
    w: QTensor,
    row_scale: Array | None,
    config: Config,
    chip: str,
    out_dtype: DTypeLike,
) -> Array:
    """Runs a kernel over blocks of weight rows and, within each, of tokens."""
    (num_tokens, num_columns), num_rows = x.shape, w.shape[0]
    by_words = (
        _is_v5e(chip)
        and w.is_4bit
        and w.codebook is None
        and x.dtype == jnp.bfloat16
        and config.block_out % LANES == 0
        and not config.dequantize
    )
    plan = Plan(num_columns, w.group_size, w.code, by_words, config.sub_out)
    operands = _operands(x, w, row_scale, config)
    scratch = _scratch(x.dtype, w, plan, config)
    names = (*operands, "out", *scratch)

    def kernel(*refs: Any) -> None:
        body = many_tokens if config.dequantize else few_tokens
        body(plan, dict(zip(names, refs, strict=True)))

    result = jax.ShapeDtypeStruct((num_tokens, num_rows), out_dtype)
    out_block = (config.block_tokens, config.block_out)
    return pl.pallas_call(
        kernel,
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(pl.cdiv(num_rows, config.block_out), pl.cdiv(num_tokens, config.block_tokens)),
            in_specs=[
                pl.BlockSpec(block, index) if block else pl.BlockSpec(memory_space=pltpu.SMEM)
                for _, block, index in operands.values()
            ],
            out_specs=pl.BlockSpec(out_block, lambda o, t: (t, o)),
            scratch_shapes=[*scratch.values()],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_vmem_limit(operands, scratch, out_block),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_tokens * num_rows * num_columns,
            bytes_accessed=w.num_bytes + x.nbytes + result.size * result.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=device.interpret_mode(),
    )(*(array for array, _, _ in operands.values()))


def _operands(x: Array, w: QTensor, row_scale: Array | None, config: Config) -> dict[str, Operand]:
    """Returns the kernel's inputs by the names its body knows."""
    num_columns = x.shape[1]
    groups = (num_columns // w.group_size, config.block_out)
    operands: dict[str, Operand] = {
        "x": (x, (config.block_tokens, num_columns), lambda o, t: (t, 0)),
        "codes": (w.qvalue, (config.block_out, num_columns), lambda o, t: (o, 0)),
        "scale": (as_loadable(w.scale), groups, lambda o, t: (0, o)),
    }
    if w.offset is not None:
        operands["offset"] = (as_loadable(w.offset), groups, lambda o, t: (0, o))
    if w.codebook is not None:
        operands["codebook"] = (w.codebook, None, lambda o, t: (0, 0))
    if row_scale is not None:
        operands["row_scale"] = (row_scale, (config.block_tokens, 1), lambda o, t: (t, 0))
    return operands


def _scratch(x_dtype: jnp.dtype[Any], w: QTensor, plan: Plan, config: Config) -> dict[str, Any]:
    """Returns what else a body keeps in VMEM, by name."""
    block_out, num_groups = config.block_out, plan.num_groups
    shapes: dict[str, Any] = {}
    if w.codebook is not None:
        shapes["table"] = pltpu.VMEM((16, LANES), jnp.float32)
    if not config.dequantize:
        # A row of an array 128 wide loads into all sublanes at once; others take shuffles.
        width = LANES if block_out % LANES == 0 else block_out
        shapes["scales"] = pltpu.VMEM((block_out // width, num_groups, width), jnp.float32)
        if w.offset is not None or plan.by_words:
            shapes["shift"] = pltpu.VMEM((num_groups, block_out), jnp.float32)
        return shapes
    shapes["weight"] = pltpu.VMEM((block_out, plan.num_columns), x_dtype)
    if num_groups > 1 or w.offset is not None:
        columns = pltpu.VMEM((block_out, pl.cdiv(num_groups, LANES) * LANES), jnp.float32)
        shapes["scale_columns"] = columns
        if w.offset is not None:
            shapes["offset_columns"] = columns
    return shapes


def _vmem_limit(
    operands: Mapping[str, Operand], scratch: Mapping[str, Any], out_block: tuple[int, int]
) -> int:
    """Returns the bytes of two buffers for each block, of scratch, and some for spills."""
    total = 2 * 4 * math.prod(out_block)
    for array, block, _ in operands.values():
        if block is not None:
            rows, columns = block
            bits = 4 if array.dtype in (jnp.int4, jnp.uint4) else 8 * array.dtype.itemsize
            total += 2 * max(rows, 8) * max(columns, LANES) * bits // 8
    for memory in scratch.values():
        *_, rows, columns = memory.shape
        padded = math.prod(memory.shape) // rows * max(rows, 8)
        total += padded * jnp.dtype(memory.dtype).itemsize
    return max(32 * _MEGABYTE, total * 5 // 4 + 16 * _MEGABYTE)
