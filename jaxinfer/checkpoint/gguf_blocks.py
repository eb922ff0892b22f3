"""GGML's block formats, taken apart into codes, scales and offsets: not one value is rounded.

One function a format. It moves the codes of `[n, block_bytes]` blocks into the order of a
`QuantizedArray` and multiplies the scales a block has at two levels as ggml does, in float32; so
`QuantizedArray.dequantize()` gives the bits of ggml's reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jaxinfer.quantized_array import QuantizedArray, abstract_array, aligned_empty

CHUNK_WEIGHTS = 1 << 18
"""Weights taken apart at a time, so that the intermediate arrays stay in a core's cache."""

Decode = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
"""(blocks `[n, block_bytes]` uint8, and to be filled: codes `[n, bytes]`, scale and offset
`[n, groups]`); offset has no columns where a format has none."""

_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)
_BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class BlockFormat:
    """What the blocks of a quantized type become: the fields of a QuantizedArray, and how."""

    code: Literal["int8", "int4", "uint4"]
    group_size: int
    scale_dtype: np.dtype[Any]
    decode: Decode
    has_offset: bool = False
    codebook: np.ndarray | None = None
    fits_five_bits: bool = False

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return 8 if self.code == "int8" else 4


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A stored type: `block_bytes` bytes hold `block_size` consecutive weights of a row.

    Exactly one of `dtype` (a plain float type) and `format` (a quantized one) is set.
    """

    name: str
    block_size: int
    block_bytes: int
    dtype: np.dtype[Any] | None = None
    format: BlockFormat | None = None


def abstract_blocks(shape: tuple[int, int], ggml_type: GgmlType) -> QuantizedArray:
    """Returns what `decode_blocks` makes of a matrix, abstract."""
    made = ggml_type.format
    assert made is not None, ggml_type.name
    return abstract_array(
        shape,
        made.code,
        made.group_size,
        made.scale_dtype,
        has_offset=made.has_offset,
        codebook=made.codebook,
        fits_five_bits=made.fits_five_bits,
    )


def decode_blocks(blocks: np.ndarray, ggml_type: GgmlType, num_rows: int) -> QuantizedArray:
    """Takes the `[n, block_bytes]` uint8 blocks of a matrix of `num_rows` rows apart."""
    made = ggml_type.format
    assert made is not None, ggml_type.name
    num_groups = ggml_type.block_size // made.group_size
    code_dtype = np.dtype(np.int8 if made.code == "int8" else np.uint8)
    codes = aligned_empty((len(blocks), ggml_type.block_size * made.code_bits // 8), code_dtype)
    scale = aligned_empty((len(blocks), num_groups), made.scale_dtype)
    offset = aligned_empty((len(blocks), num_groups * made.has_offset), made.scale_dtype)
    step = CHUNK_WEIGHTS // ggml_type.block_size
    with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN scales stay themselves
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            made.decode(blocks[part], codes[part], scale[part], offset[part])
    return QuantizedArray(
        codes.reshape(num_rows, -1),
        scale.reshape(num_rows, -1),
        offset.reshape(num_rows, -1) if made.has_offset else None,
        made.codebook,
        code=made.code,
        group_size=made.group_size,
        fits_five_bits=made.fits_five_bits,
    )


# Codes are moved sixteen bytes, a "plane" of every block, at a time, and computed with as eight
# bytes in one integer: numpy's loops over a block's own few bytes would cost ten times as much.
_PLANE = np.dtype("V16")
_ONES = np.uint64(0x0101010101010101)
_LOW, _HIGH = _ONES * np.uint64(0x0F), _ONES * np.uint64(0xF0)
_TWO_BITS = _ONES * np.uint64(3)

_BYTE_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_FIFTH_BITS = (_BYTE_BITS << 4).view(np.uint64)[:, 0]
"""By a byte of eight fifth bits: eight bytes with 16 where the bit is one, as one integer."""
_FIFTH_BITS_SIGNED = ((_BYTE_BITS ^ 1) * np.uint8(0xF0)).view(np.uint64)[:, 0]
"""The same for codes minus 16: bits 4 to 7 are zeros where the fifth bit is one, else ones."""

_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
_E8M0_HALVED = np.ldexp(1.0, np.arange(256) - 128).astype(_BF16)
"""ggml's e8m0 scales: half the number, 2**(e - 127), as its table of e2m1 values is doubled."""


def _planes(blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Bytes `start:stop` of n blocks by sixteens, uint64 `[(stop - start) / 16, 2 * n]`."""
    return np.ascontiguousarray(blocks[:, start:stop].view(_PLANE).T).view(np.uint64)


def _store(codes: np.ndarray, which: slice, planes: np.ndarray) -> None:
    """Makes `planes` the planes `which` of every block's codes."""
    codes.view(_PLANE)[:, which] = planes.view(_PLANE).T


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at byte `offset` of every block, `[n]`."""
    return blocks[:, offset : offset + 2].view(np.float16)[:, 0]


def _bytes_first(blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Bytes `start:stop` of every block, `[stop - start, n]`."""
    return np.ascontiguousarray(blocks[:, start:stop].T)


def _copied_codes(blocks: np.ndarray, start: int, codes: np.ndarray) -> None:
    """Copies codes that stand in the file as they do here, from byte `start` on."""
    for plane in range(codes.shape[1] // 16):
        begin = start + 16 * plane
        codes.view(_PLANE)[:, plane] = blocks[:, begin : begin + 16].view(_PLANE)[:, 0]


def _decode_q4_0(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    scale[:, 0] = _half(blocks, 0)
    _copied_codes(blocks, 2, codes)


def _decode_q4_1(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> None:
    scale[:, 0] = _half(blocks, 0)
    offset[:, 0] = _half(blocks, 2)
    _copied_codes(blocks, 4, codes)


def _five_bit_codes(blocks: np.ndarray, start: int, table: np.ndarray, codes: np.ndarray) -> None:
    """Fills codes from 32 fifth bits at byte `start`, given their places, and nibbles behind."""
    nibbles = _planes(blocks, start + 4, start + 20)
    _store(codes, slice(0, 1), nibbles & _LOW)
    _store(codes, slice(1, 2), (nibbles >> 4) & _LOW)
    words = codes.view(np.uint64)
    np.bitwise_or(words, table.take(blocks[:, start : start + 4]), out=words)


def _decode_q5_0(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    scale[:, 0] = _half(blocks, 0)
    _five_bit_codes(blocks, 2, _FIFTH_BITS_SIGNED, codes)


def _decode_q5_1(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> None:
    scale[:, 0] = _half(blocks, 0)
    offset[:, 0] = _half(blocks, 2)
    _five_bit_codes(blocks, 4, _FIFTH_BITS, codes)


def _decode_q8_0(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    scale[:, 0] = _half(blocks, 0)
    _copied_codes(blocks, 2, codes)


def _decode_mxfp4(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    scale[:, 0] = _E8M0_HALVED[blocks[:, 0]]
    _copied_codes(blocks, 1, codes)


def _decode_q2_k(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> None:
    pairs = _bytes_first(blocks, 0, 16)
    scale.T[:] = _half(blocks, 80).astype(np.float32) * (pairs & 15)
    offset.T[:] = -(_half(blocks, 82).astype(np.float32) * (pairs >> 4))
    planes = _planes(blocks, 16, 80)  # of 32 bytes, each two bits are 32 consecutive columns
    for quarter in range(4):
        two = (planes >> 2 * quarter) & _TWO_BITS
        _store(codes, slice(quarter, None, 4), two[0::2] | (two[1::2] << 4))


def _decode_q3_k(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    packed = _bytes_first(blocks, 96, 108)  # sixteen low nibbles, then sixteen upper two bits
    low = np.concatenate([packed[:8] & 15, packed[:8] >> 4])
    high = np.concatenate([packed[8:] >> shift & 3 for shift in (0, 2, 4, 6)])
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale.T[:] = _half(blocks, 108).astype(np.float32) * scales
    third_bits, planes = _planes(blocks, 0, 32), _planes(blocks, 32, 96)
    for chunk in range(8):
        half, quarter = divmod(chunk, 4)
        # Minus 4 where the third bit is zero, and 8 more as an int4 code is stored.
        biased = (((third_bits >> chunk) & _ONES) + _ONES) << 2
        two = (planes[2 * half : 2 * half + 2] >> 2 * quarter) & _TWO_BITS
        code = two + biased
        _store(codes, slice(chunk, chunk + 1), code[:1] | (code[1:] << 4))


def _scales_and_offsets(blocks: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> None:
    """Fills the eight scales and eight offsets of Q4_K and Q5_K blocks.

    Twelve bytes hold sixteen 6-bit numbers: 0-3 and 4-7 in the low bits of bytes 0-3 and 4-7; the
    others take a nibble of bytes 8-11 and, as their top bits, the two that the former left free.
    """
    first, second, rest = np.split(_bytes_first(blocks, 4, 16), 3)
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)])
    mins = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)])
    scale.T[:] = _half(blocks, 0).astype(np.float32) * scales
    offset.T[:] = -(_half(blocks, 2).astype(np.float32) * mins)


def _decode_q4_k(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> None:
    _scales_and_offsets(blocks, scale, offset)
    planes = _planes(blocks, 16, 144)  # of 32 bytes, all low nibbles precede all high ones
    first, second = planes[0::2], planes[1::2]
    _store(codes, slice(0, None, 2), (first & _LOW) | ((second & _LOW) << 4))
    _store(codes, slice(1, None, 2), ((first >> 4) & _LOW) | (second & _HIGH))


def _decode_q5_k(
    blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray
) -> None:
    _scales_and_offsets(blocks, scale, offset)
    fifth_bits, planes = _planes(blocks, 16, 48), _planes(blocks, 48, 176)
    for group in range(8):
        pair, half = divmod(group, 2)
        nibbles = (planes[2 * pair : 2 * pair + 2] >> 4 * half) & _LOW
        fifth = ((fifth_bits >> group) & _ONES) << 4
        _store(codes, slice(2 * group, 2 * group + 2), nibbles | fifth)


def _decode_q6_k(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray, _: np.ndarray) -> None:
    scales = _bytes_first(blocks, 192, 208).view(np.int8)
    scale.T[:] = _half(blocks, 208).astype(np.float32) * scales
    planes, top_bits = _planes(blocks, 0, 128), _planes(blocks, 128, 192)
    for chunk in range(8):
        half, quarter = divmod(chunk, 4)
        begin = 4 * half + 2 * (quarter % 2)
        nibbles = (planes[begin : begin + 2] >> 4 * (quarter // 2)) & _LOW
        top = ((top_bits[2 * half : 2 * half + 2] >> 2 * quarter) & _TWO_BITS) << 4
        _store(codes, slice(2 * chunk, 2 * chunk + 2), nibbles | top)
    np.subtract(codes, np.int8(32), out=codes)


def _float(name: str, dtype: np.dtype[Any]) -> GgmlType:
    return GgmlType(name, 1, dtype.itemsize, dtype)


def _blocks(
    name: str,
    block_size: int,
    block_bytes: int,
    code: Literal["int8", "int4", "uint4"],
    group_size: int,
    scale_dtype: np.dtype[Any],
    decode: Decode,
    *,
    has_offset: bool = False,
    codebook: np.ndarray | None = None,
    bits: int = 8,
) -> GgmlType:
    made = BlockFormat(code, group_size, scale_dtype, decode, has_offset, codebook, bits == 5)
    return GgmlType(name, block_size, block_bytes, format=made)


GGML_TYPES: dict[int, GgmlType] = {
    0: _float("F32", np.dtype("<f4")),
    1: _float("F16", np.dtype("<f2")),
    2: _blocks("Q4_0", 32, 18, "int4", 32, _F16, _decode_q4_0),
    3: _blocks("Q4_1", 32, 20, "uint4", 32, _F16, _decode_q4_1, has_offset=True),
    6: _blocks("Q5_0", 32, 22, "int8", 32, _F16, _decode_q5_0, bits=5),
    7: _blocks("Q5_1", 32, 24, "int8", 32, _F16, _decode_q5_1, bits=5, has_offset=True),
    8: _blocks("Q8_0", 32, 34, "int8", 32, _F16, _decode_q8_0),
    10: _blocks("Q2_K", 256, 84, "uint4", 16, _F32, _decode_q2_k, has_offset=True),
    11: _blocks("Q3_K", 256, 110, "int4", 16, _F32, _decode_q3_k),
    12: _blocks("Q4_K", 256, 144, "uint4", 32, _F32, _decode_q4_k, has_offset=True),
    13: _blocks("Q5_K", 256, 176, "int8", 32, _F32, _decode_q5_k, bits=5, has_offset=True),
    14: _blocks("Q6_K", 256, 210, "int8", 16, _F32, _decode_q6_k),
    30: _float("BF16", _BF16),
    39: _blocks("MXFP4", 32, 17, "uint4", 32, _BF16, _decode_mxfp4, codebook=_E2M1_DOUBLED),
}
"""The types that can be read, by their number in the file."""

UNSUPPORTED_TYPE_NAMES: dict[int, str] = {
    4: "Q4_2 (removed)",
    5: "Q4_3 (removed)",
    9: "Q8_1",
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
    40: "NVFP4",
    41: "Q1_0",
}
"""Names for refusals; a number in neither table is not a GGML type known to us."""
