"""GGML's block formats, decoded to float32: the same bits as ggml's reference.

One function a format, blocks in and rows of weights out. Rounding follows the formula as written,
one float32 operation at a time: multiply, then add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

CHUNK_WEIGHTS = 1 << 16
"""Weights decoded at a time, so that the intermediate arrays stay in a core's cache."""

BITS = np.arange(32, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A stored type: `block_bytes` bytes hold `block_size` consecutive weights of a row.

    Exactly one of `dtype` (a plain float type) and `decode` (fills `[n, block_size]` float32 from
    `[n, block_bytes]` uint8) is set.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype | None = None
    decode: Callable[[np.ndarray, np.ndarray], None] | None = None


def dequantize(blocks: np.ndarray, ggml_type: GgmlType) -> np.ndarray:
    """Returns the weights of `[n, block_bytes]` uint8 blocks as `[n * block_size]` float32."""
    assert ggml_type.decode is not None, ggml_type.name
    out = np.empty((len(blocks), ggml_type.block_size), np.float32)
    step = CHUNK_WEIGHTS // ggml_type.block_size
    with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN scales decode to themselves
        for start in range(0, len(blocks), step):
            ggml_type.decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(-1)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at byte `offset` of every block, as float32 `[n, 1]`."""
    return blocks[:, offset : offset + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """`[n, g, w]` bytes to `[n, g * 2 * w]`: in each group all low nibbles, then all high ones."""
    out = np.empty((*packed.shape[:2], 2, packed.shape[2]), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out.reshape(len(packed), -1)


def _five_bits(blocks: np.ndarray, offset: int) -> np.ndarray:
    """`[n, 32]` codes whose fifth bits are the word at `offset` and whose nibbles follow it."""
    fifth = blocks[:, offset : offset + 4].copy().view("<u4") >> BITS & np.uint32(1)
    return _nibbles(blocks[:, None, offset + 4 :]) | (fifth.astype(np.uint8) << 4)


def _decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks[:, None, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0), out=out)


def _decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_nibbles(blocks[:, None, 4:]), _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(blocks, 2).view(np.int8) - np.int8(16), _half(blocks, 0), out=out)


def _decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(blocks, 4), _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _scales_and_mins(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and eight minima of a Q4_K or Q5_K block, float32 `[n, 8, 1]` each.

    Twelve bytes hold sixteen 6-bit numbers: 0-3 and 4-7 in the low bits of bytes 0-3 and 4-7; the
    others take a nibble of bytes 8-11 and, as their top bits, the two that the former left free.
    """
    first, second, rest = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.hstack([first & 63, (rest & 15) | (first >> 6 << 4)])
    mins = np.hstack([second & 63, (rest >> 4) | (second >> 6 << 4)])
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * mins)[:, :, None]


def _decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = _scales_and_mins(blocks)
    rows = out.reshape(-1, 8, 32)
    np.multiply(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), scales, out=rows)
    np.subtract(rows, mins, out=rows)


def _decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, mins = _scales_and_mins(blocks)
    fifth = blocks[:, None, 16:48] >> BITS[:8, None].astype(np.uint8) & 1  # [n, 8, 32]
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | (fifth << 4)
    rows = out.reshape(-1, 8, 32)
    np.multiply(codes, scales, out=rows)
    np.subtract(rows, mins, out=rows)


def _decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    top = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3  # [n, 2, 4, 32]
    codes = _nibbles(blocks[:, :128].reshape(-1, 2, 64)) | (top.reshape(-1, 256) << 4)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    codes = (codes.view(np.int8) - np.int8(32)).reshape(-1, 16, 16)
    np.multiply(codes, scales[:, :, None], out=out.reshape(-1, 16, 16))


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4, dtype=np.dtype("<f4")),
    1: GgmlType("F16", 1, 2, dtype=np.dtype("<f2")),
    2: GgmlType("Q4_0", 32, 18, decode=_decode_q4_0),
    3: GgmlType("Q4_1", 32, 20, decode=_decode_q4_1),
    6: GgmlType("Q5_0", 32, 22, decode=_decode_q5_0),
    7: GgmlType("Q5_1", 32, 24, decode=_decode_q5_1),
    8: GgmlType("Q8_0", 32, 34, decode=_decode_q8_0),
    12: GgmlType("Q4_K", 256, 144, decode=_decode_q4_k),
    13: GgmlType("Q5_K", 256, 176, decode=_decode_q5_k),
    14: GgmlType("Q6_K", 256, 210, decode=_decode_q6_k),
    30: GgmlType("BF16", 1, 2, dtype=np.dtype(ml_dtypes.bfloat16)),
}
"""The types that can be read, by their number in the file."""

UNSUPPORTED_TYPE_NAMES: dict[int, str] = {
    4: "Q4_2 (removed)",
    5: "Q4_3 (removed)",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    31: "Q4_0_4_4 (removed)",
    32: "Q4_0_4_8 (removed)",
    33: "Q4_0_8_8 (removed)",
    34: "TQ1_0",
    35: "TQ2_0",
    36: "IQ4_NL_4_4 (removed)",
    37: "IQ4_NL_4_8 (removed)",
    38: "IQ4_NL_8_8 (removed)",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names for refusals; a number in neither table is not a GGML type known to us."""
