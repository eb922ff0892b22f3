"""Random arrays made on the device, plain and quantized, as fast as memory takes them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from kernels.quantized_matmul import QFormat, QTensor


def random_bits(shape: tuple[int, ...], seed: int | Array) -> Array:
    """Returns uint32 hashes of each element's index: one fused operation, no temporaries."""
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    bits = index + jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # as MurmurHash3 ends
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def noise(shape: tuple[int, ...], seed: int | Array) -> Array:
    """Returns float32 values of mean 0 and variance 1, uniform."""
    unit = (random_bits(shape, seed) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return (unit - jnp.float32(0.5)) * jnp.float32(math.sqrt(12))


def random_codes(shape: tuple[int, ...], dtype: DTypeLike, seed: int | Array) -> Array:
    """Returns random codes of a quantized array: every value a dtype has, but int8's -128."""
    bits, dtype = random_bits(shape, seed), jnp.dtype(dtype)
    if dtype == jnp.uint8:
        return bits.astype(jnp.uint8)
    if dtype == jnp.uint4:
        return (bits & 15).astype(jnp.uint8).astype(dtype)
    if dtype == jnp.int4:
        return ((bits & 15).astype(jnp.int8) - jnp.int8(8)).astype(dtype)
    if dtype == jnp.int8:
        return ((bits % 255).astype(jnp.int32) - 127).astype(jnp.int8)
    return (noise(shape, seed) * 100).astype(dtype)


def random_held(struct: Any) -> Array:
    """Returns an array of a KV cache: values, int8 codes, or the words that hold several.

    A word of int32 holds four codes, of uint32 two bfloat16 values; uint16 is a bfloat16's bits.
    """

    def bfloat16_bits(seed: int) -> Array:
        return lax.bitcast_convert_type(noise(struct.shape, seed).astype(jnp.bfloat16), jnp.uint16)

    if struct.dtype == jnp.int32:
        return lax.bitcast_convert_type(random_bits(struct.shape, 1), jnp.int32)
    if struct.dtype == jnp.uint32:
        low, high = (bfloat16_bits(seed).astype(jnp.uint32) for seed in (1, 2))
        return low | (high << 16)
    if struct.dtype == jnp.uint16:
        return bfloat16_bits(1)
    if struct.dtype == jnp.int8:
        return random_codes(struct.shape, struct.dtype, 1)
    return noise(struct.shape, 1).astype(struct.dtype)


def weight_bytes(weight: Any) -> int:
    """Bytes of a matrix, quantized or not."""
    if isinstance(weight, QTensor):
        return weight.num_bytes
    return math.prod(weight.shape) * weight.dtype.itemsize


def random_weight(struct: Any, fmt: QFormat | None, seed: Array) -> Any:
    """Returns a matrix that keeps the size of what it multiplies, in the form of `struct`.

    Quantized ones get random codes at once: nothing is rounded, so it takes no time or memory.
    """
    scale = struct.shape[1] ** -0.5
    if fmt is None:
        return (noise(struct.shape, seed) * scale).astype(struct.dtype)
    codes = random_codes(struct.qvalue.shape, struct.qvalue.dtype, seed)
    deviation = {"int8": 73.3, "fp8": 100.0}.get(fmt.code, 4.6)
    if fmt.codebook is not None:
        deviation = float(np.std(fmt.codebook))
    scales = scale / deviation * (1 + 0.1 * noise(struct.scale.shape, seed + jnp.uint32(1)))
    return dataclasses.replace(
        struct,
        qvalue=codes,
        scale=scales.astype(struct.scale.dtype),
        offset=None if struct.offset is None else (-7.5 * scales).astype(struct.offset.dtype),
        codebook=None if fmt.codebook is None else jnp.asarray(fmt.codebook, jnp.float32),
    )
