"""Codes, groups and zero points: from integer words to the arrays of a QuantizedArray.

Codes are unsigned here, as GPTQ, AWQ and compressed-tensors store them: an `int4` code q is q + 8,
which is also how a QuantizedArray stores it, and an `int8` code q is q + 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from jaxinfer.checkpoint.prequantized.method import Stored
from jaxinfer.checkpoint.safetensors import RAW_DTYPES
from jaxinfer.quantized_array import (
    NIBBLE_CHUNK,
    QuantizedArray,
    abstract_array,
    pack_codes,
)

GROUP_SIZES = (128, 64, 32, 16)
"""Weights per scale that a QTensor may have, other than a whole row; largest first."""

ROWS_AT_ONCE = 128  # unpacked, so many rows still fit into a core's cache


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the codes in int32 words `[R, W]`, lowest bits first, as uint8 `[R, 32 W / bits]`."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    return raw if bits == 8 else _nibbles(raw)


def unpack_bytes_high_first(raw: np.ndarray) -> np.ndarray:
    """Returns the 4-bit codes in bytes `[R, B]`, high half first, as uint8 `[R, 2 B]`."""
    return _nibbles((raw << 4) | (raw >> 4))


def _nibbles(raw: np.ndarray) -> np.ndarray:
    codes = np.empty((*raw.shape, 2), np.uint8)
    np.bitwise_and(raw, 0xF, out=codes[..., 0])
    np.right_shift(raw, 4, out=codes[..., 1])
    return codes.reshape(len(raw), -1)


def pack_rows(
    shape: tuple[int, int],
    bits: int,
    codes: Callable[[slice], np.ndarray],
    perm: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the qvalue of a matrix whose unsigned codes `codes(rows)` gives, uint8 `[rows, I]`.

    With `perm`, stored column i holds the codes of column `perm[i]`.
    """
    rows, columns = shape
    packed = np.empty((rows, columns * bits // 8), np.uint8)
    for begin in range(0, rows, ROWS_AT_ONCE):
        block = slice(begin, min(begin + ROWS_AT_ONCE, rows))
        of_block = codes(block)
        if perm is not None:
            of_block = of_block.take(perm, axis=1)
        packed[block] = pack_codes(of_block) if bits == 4 else of_block ^ 0x80
    return packed if bits == 4 else packed.view(np.int8)


def affine(
    qvalue: np.ndarray,
    bits: int,
    scale: np.ndarray,
    zero: np.ndarray | None,
    group_size: int,
    perm: np.ndarray | None = None,
    activations: Literal["float", "int8"] = "float",
) -> QuantizedArray:
    """Returns the matrix of weights `scale * (code - zero)`, one int32 zero per scale.

    Without zeros, or where all of them are half of the range, it needs no offset. Otherwise scales
    and offsets are float32: the product of a float16 or bfloat16 scale and a zero is exact there.
    """
    middle = 1 << (bits - 1)
    offset = None
    if zero is not None and (zero != middle).any():
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or NaN
            scale = scale.astype(np.float32)
            offset = scale * ((middle if bits == 8 else 0) - zero).astype(np.float32)
    code: Literal["int4", "uint4", "int8"] = "int4" if offset is None else "uint4"
    return QuantizedArray(
        qvalue,
        np.ascontiguousarray(scale),
        None if offset is None else np.ascontiguousarray(offset),
        perm=perm,
        code="int8" if bits == 8 else code,
        group_size=group_size,
        activations=activations,
    )


def usable_group(block: int, columns: int) -> int | None:
    """Returns the largest group size whose groups lie inside blocks of `block` columns; or None."""
    if block >= columns:
        return columns
    fitting = (size for size in GROUP_SIZES if block % size == 0 and columns % size == 0)
    return next(fitting, None)


def group_of(stored: Stored, block: int, columns: int) -> int:
    """Returns `usable_group`; raises CheckpointError, about `stored`, where there is none."""
    group_size = usable_group(block, columns)
    if group_size is None:
        raise stored.error(
            f"{block} weights share a scale in rows of {columns}: no group size of "
            f"{', '.join(map(str, reversed(GROUP_SIZES)))} divides both; quantize the model again "
            "with one of these"
        )
    return group_size


def spread_groups(values: np.ndarray, block: int, columns: int, group_size: int) -> np.ndarray:
    """Returns values `[O, blocks]` once per group instead: `[O, I / group_size]`."""
    if values.shape[1] == columns // group_size:
        return values
    return values[:, np.arange(0, columns, group_size) // block]


def act_order(g_idx: Stored, block: int, columns: int) -> np.ndarray | None:
    """Returns the column behind each stored column, int32 `[I]`; None where nothing moves.

    Raises:
      CheckpointError: a group index is out of range, or a group has not exactly `block` columns.
    """
    groups = g_idx.read()
    num_groups = columns // block
    if groups.min() < 0 or groups.max() >= num_groups:
        wrong = int(groups.min() if groups.min() < 0 else groups.max())
        raise g_idx.error(f"group {wrong} is not one of the {num_groups} groups of {block} columns")
    sizes = np.bincount(groups, minlength=num_groups)
    if (sizes != block).any():
        group = int((sizes != block).argmax())
        raise g_idx.error(f"group {group} has {sizes[group]} columns instead of {block}")
    perm = np.argsort(groups, kind="stable").astype(np.int32)
    return None if (perm == np.arange(columns)).all() else perm


def check_width(stored: Stored, bits: int, columns: int) -> None:
    """Raises CheckpointError where 4-bit codes do not come in whole chunks."""
    if bits == 4 and columns % NIBBLE_CHUNK:
        raise stored.error(
            f"a 4-bit matrix {columns} wide is not supported: the width must be a multiple of "
            f"{NIBBLE_CHUNK}; leave this matrix unquantized"
        )


def abstract_affine(
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    scale_dtype: str,
    *,
    has_offset: bool = False,
    has_perm: bool = False,
    activations: Literal["float", "int8"] = "float",
) -> QuantizedArray:
    """Returns the largest matrix that `affine` may make, abstract."""
    code: Literal["int4", "uint4"] = "uint4" if has_offset else "int4"
    return abstract_array(
        shape,
        "int8" if bits == 8 else code,
        group_size,
        np.dtype(np.float32) if has_offset else RAW_DTYPES[scale_dtype],
        has_offset=has_offset,
        has_perm=has_perm,
        activations=activations,
    )
