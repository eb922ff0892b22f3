"""How the Triton kernel of quantized matmul turns stored codes into floats, in registers.

By integer arithmetic on the floats' bits, which is cheaper than conversions from integers and
needs no float8 in hardware. 4-bit codes come as uint32 words of the GPU layout.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernels._compat import import_pallas_triton

plgpu: Any = import_pallas_triton()

RUN = 64
"""Columns whose 4-bit codes share 32 bytes: the first 32 are the low halves."""

FP8_UNIT = 256.0
"""How much larger float8_e4m3fn numbers are than the float16 with the same fields."""

_BYTE_MAGIC = {"bfloat16": 0x4300, "float16": 0x6400}  # 128 and 1024: the last bits count in ones
_NIBBLE_MAGIC = {"bfloat16": (0x4180, 3), "float16": (0x4C00, 6)}  # 16, and the bit that does


def in_word_order(x: Array, chunk: int) -> Array:
    """Returns x's columns as 4-bit codes meet them: the n-th of each 16 bits, for n in 0..3.

    Within chunks of columns. The u-th 16 bits of a run hold columns 2u and 2u + 32, then 2u + 1
    and 2u + 33.
    """
    runs = x.reshape(x.shape[0], -1, chunk // RUN, 2, RUN // 4, 2)
    return runs.transpose(0, 1, 5, 3, 2, 4).reshape(x.shape)


def code_base(code: str, dtype: Any, has_codebook: bool) -> int:
    """Returns by how much numbers of `from_nibbles` exceed the codes that they stand for."""
    if has_codebook or dtype == jnp.float32:
        return 0
    return 16 + (8 if code == "int4" else 0)


def from_nibbles(words: Array, nibble: int, code: str, dtype: Any, codebook: Any) -> Array:
    """Decodes the n-th 4 bits of each 16 in uint32 words `[O, K]` to x's dtype, `[O, 2K]`.

    Numbers of 16 bits are made in pairs, each in the register that a tensor core takes it from.
    They are `code_base` too large.
    """
    if codebook is None and dtype != jnp.float32:
        magic, position = _NIBBLE_MAGIC[dtype.name]
        shift = 4 * nibble - position
        moved = words >> np.uint32(shift) if shift > 0 else words << np.uint32(-shift)
        pair = moved & np.uint32((0xF << position) * 0x10001) | np.uint32(magic * 0x10001)
        return _halves(pair, dtype)
    pairs = [words >> np.uint32(shift) & np.uint32(15) for shift in (4 * nibble, 4 * nibble + 16)]
    if codebook is not None:
        numbers = [plgpu.load(codebook.at[index.astype(jnp.int32)]) for index in pairs]
    else:
        bias = np.int32(8 if code == "int4" else 0)
        numbers = [(code.astype(jnp.int32) - bias).astype(jnp.float32) for code in pairs]
    return jnp.stack(numbers, -1).reshape(words.shape[0], -1)


def constant(value: float, stored: Array, dtype: Any) -> Array:
    """Returns numbers that all have one value, shaped like decoded bytes `[O, K]` or words.

    Triton fetches x ahead only if all products that take it lay it out alike, which follows from
    how their other operand came to be: so this is a function of what is stored too.
    """
    is_words = stored.dtype == jnp.uint32
    if dtype in (jnp.float32, jnp.int8):
        return jnp.full((stored.shape[0], (1 + is_words) * stored.shape[1]), value, dtype)
    bits = int(np.asarray(value, dtype).view(np.uint16))
    if is_words:
        zero = stored >> np.uint32(31) >> np.uint32(1)
        return _halves(zero | np.uint32(bits * 0x10001), dtype)
    zero = stored.astype(jnp.uint8).astype(jnp.uint16) >> np.uint16(8)
    return lax.bitcast_convert_type(zero | np.uint16(bits), dtype)


def _halves(words: Array, dtype: Any) -> Array:
    """Returns the 16-bit halves of uint32 words `[O, K]`, lower first, as floats `[O, 2K]`."""
    halves = [words.astype(jnp.uint16), (words >> np.uint32(16)).astype(jnp.uint16)]
    halves = [lax.bitcast_convert_type(half, dtype) for half in halves]
    return jnp.stack(halves, -1).reshape(words.shape[0], -1)


def from_bytes(stored: Array, code: str, dtype: Any) -> Array:
    """Decodes int8 codes, or float8_e4m3fn codes' bits, to numbers of x's dtype.

    Float8 numbers come out `FP8_UNIT` times too small.
    """
    bits = stored.astype(jnp.uint8).astype(jnp.uint16)
    low, high = bits & np.uint16(0x7F), bits & np.uint16(0x80)
    if code == "fp8":
        half = lax.bitcast_convert_type(low << np.uint16(7) | high << np.uint16(8), jnp.float16)
        return half.astype(dtype)
    if dtype in (jnp.int8, jnp.float32):
        return stored.astype(dtype)
    # With seven bits of mantissa, bit 7 turns 128 to 256; a negative code is its low bits - 128.
    magic = np.uint16(_BYTE_MAGIC[dtype.name])
    low, high = (lax.bitcast_convert_type(part | magic, dtype) for part in (low, high))
    return low - high
