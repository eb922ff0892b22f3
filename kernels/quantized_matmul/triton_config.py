"""Block sizes of the Triton kernel of quantized matmul, where none were measured."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from kernels import device
from kernels.quantized_matmul.format import QTensor


@dataclass(frozen=True)
class Config:
    """How a call is cut into blocks; sizes are powers of two.

    Attributes:
      block_t, block_o: tokens and weight rows of one block's result.
      block_i: columns per loop step; fewer where 4-bit codes' I is not a multiple of it.
      split_i: blocks that share the columns of one result.
      scale_sums: scales multiply each group's sums of products; else each weight, before.
      num_warps, num_stages: of a block; stages are loop steps whose loads are under way.
    """

    block_t: int
    block_o: int
    block_i: int
    split_i: int = 1
    scale_sums: bool = True
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def for_call(cls, x: Array | jax.ShapeDtypeStruct, w: QTensor, on: device.Device) -> Config:
        """Returns sizes legal for any call, that give a device's multiprocessors enough blocks."""
        num_tokens = x.shape[0]
        slow_tensor_cores = on.compute_capability in ((8, 6), (8, 9))
        sizes = _float32_sizes if x.dtype == jnp.float32 else _sizes
        block_t, block_o, block_i, num_warps, num_stages = sizes(num_tokens, w)
        if w.is_4bit or w.offset is not None:
            # What makes sums of x costs products; scaling weights costs arithmetic.
            scale_sums = block_t <= (8 if slow_tensor_cores else 16)
        else:
            scale_sums = block_t <= min(64, w.group_size)
        split_i = 1
        if num_tokens <= block_t:
            split_i = _best_split(num_tokens, w, block_o, block_i * 2 * num_stages, on.core_count)
        return cls(block_t, block_o, block_i, split_i, scale_sums, num_warps, num_stages)


def _sizes(num_tokens: int, w: QTensor) -> tuple[int, int, int, int, int]:
    """Returns block sizes, warps and stages for x of 16 bits."""
    if num_tokens <= 8:
        return (8, 64, 128, 2, 4) if w.is_4bit else (8, 64, 128, 4, 4)
    if num_tokens <= 16:
        if not w.is_4bit:
            return (16, 64, 128, 4, 3)
        return (16, 64 if w.group_size < 128 else 128, 128, 4, 4)
    if num_tokens <= 64:
        block_t = pl.next_power_of_2(num_tokens)
        if w.is_4bit and w.group_size >= 128:
            return (block_t, 128, 128, 8, 3)
        return (block_t, 128, 64, 8, 4 if w.is_4bit else 3)
    if w.activations == "int8" and w.group_size < w.shape[1]:
        return (64, 128, 64, 8, 3)  # two results are in registers: a group's and the whole
    if w.group_size < 32 and not w.is_4bit:
        return (128, 128, 64, 8, 3)  # bytes of narrow pieces are spread over more registers
    return (128, 128, 64, 4, 3)


def _float32_sizes(num_tokens: int, w: QTensor) -> tuple[int, int, int, int, int]:
    """Returns them for float32, whose exact products are no tensor cores' work."""
    return (min(max(pl.next_power_of_2(num_tokens), 8), 16), 32, 64, 4, 3)


def _best_split(num_tokens: int, w: QTensor, block_o: int, least: int, cores: int) -> int:
    """Returns over how many blocks I is best split, each of `least` columns or more.

    Cores read equally fast, so what counts is the most that one has to read; parts of the result
    are written and read once more, and each block starts with empty hands.
    """
    num_rows, num_columns = w.shape

    def cost(split: int) -> float:
        blocks = pl.cdiv(num_rows, block_o) * split
        parts = 8 * num_tokens * num_rows * split if split > 1 else 0
        return (w.num_bytes + parts) * pl.cdiv(blocks, cores) / blocks * (1 + split / 64)

    splits = [1]
    while num_columns >= 2 * splits[-1] * least and splits[-1] < 64:
        splits.append(2 * splits[-1])
    return min(splits, key=cost)
