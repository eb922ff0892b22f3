"""A matrix as quantized checkpoints hold it: codes with scales, in numpy, of no file format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

NIBBLE_CHUNK = 32
"""Columns whose 4-bit codes share 16 bytes: `kernels.quantized_matmul`'s layout on CPU."""

_SIGNED_BIAS = 8  # an int4 code -8..7 is stored as 0..15
_CHUNK_WEIGHTS = 1 << 16  # dequantized at a time, so that they stay in a core's cache
_ALIGNMENT = 64  # bytes; what XLA:CPU asks of a buffer


@dataclass(frozen=True)
class QuantizedArray:
    """A logical matrix `[O, I]`: with q the code as a number and g its group, in float32,

        w = scale[g] * q + offset[g]      or      w = scale[g] * codebook[q]

    rounded after each operation. What each field may hold is what `QTensor` says of it.

    Attributes:
      qvalue: int8 or float8_e4m3fn `[O, I]`; 4-bit codes uint8 `[O, I / 2]`: byte j of each 16
        holds column j of a chunk of 32 in its low half and column j + 16 in its high half. An
        `int4` code q is stored as q + 8.
      scale, offset: `[O, I / group_size]` in float16, bfloat16 or float32; offset may be None.
      codebook: float32 `[16]` or None.
      perm: int32 `[I]` or None: stored column i multiplies `x[:, perm[i]]`.
      activations: what products are meant to be of: x as it is, or x rounded to int8.
      fits_five_bits: see `QTensor`.
    """

    qvalue: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None
    codebook: np.ndarray | None = None
    perm: np.ndarray | None = None
    code: Literal["int8", "fp8", "int4", "uint4"] = "int8"
    group_size: int = 0
    activations: Literal["float", "int8"] = "float"
    fits_five_bits: bool = False

    @property
    def is_4bit(self) -> bool:
        """Whether codes have four bits."""
        return self.code in ("int4", "uint4")

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (O, I)."""
        rows, columns = self.qvalue.shape
        return rows, columns * 2 if self.is_4bit else columns

    @property
    def num_bytes(self) -> int:
        """Bytes its arrays take."""
        leaves = (self.qvalue, self.scale, self.offset, self.codebook, self.perm)
        return sum(leaf.nbytes for leaf in leaves if leaf is not None)

    def map_rows(self, change: Callable[[np.ndarray], np.ndarray]) -> QuantizedArray:
        """Returns it with `change`, which may only move whole rows, applied to its arrays."""
        offset = None if self.offset is None else change(self.offset)
        return dataclasses.replace(
            self, qvalue=change(self.qvalue), scale=change(self.scale), offset=offset
        )

    def dequantize(self) -> np.ndarray:
        """Returns the float32 matrix `[O, I]`, its columns in logical order."""
        rows, columns = self.shape
        weight = np.empty((rows, columns), np.float32)
        step = max(1, _CHUNK_WEIGHTS // columns)
        with np.errstate(invalid="ignore", over="ignore"):  # inf and NaN scales stay themselves
            for start in range(0, rows, step):
                self._dequantize_rows(slice(start, start + step), weight[start : start + step])
        if self.perm is None:
            return weight
        logical = np.empty_like(weight)
        logical[:, self.perm] = weight
        return logical

    def _dequantize_rows(self, rows: slice, out: np.ndarray) -> None:
        """Fills `out` with some rows, their columns in stored order."""
        grouped = out.reshape(len(out), -1, self.group_size)
        numbers = self._numbers(rows).reshape(grouped.shape)
        np.multiply(numbers, self.scale[rows].astype(np.float32)[..., None], out=grouped)
        if self.offset is not None:
            np.add(grouped, self.offset[rows].astype(np.float32)[..., None], out=grouped)

    def _numbers(self, rows: slice) -> np.ndarray:
        """The codes of some rows, `[O, I]`, in a type whose numbers float32 holds exactly."""
        if not self.is_4bit:
            codes = self.qvalue[rows]
            return codes if codes.dtype == np.int8 else codes.astype(np.float32)
        nibbles = unpack_codes(self.qvalue[rows])
        if self.codebook is not None:
            return self.codebook.astype(np.float32).take(nibbles)
        return nibbles.view(np.int8) - np.int8(_SIGNED_BIAS) if self.code == "int4" else nibbles


def abstract_array(
    shape: tuple[int, int],
    code: Literal["int8", "fp8", "int4", "uint4"],
    group_size: int,
    scale_dtype: np.dtype[Any],
    *,
    has_offset: bool = False,
    codebook: np.ndarray | None = None,
    has_perm: bool = False,
    activations: Literal["float", "int8"] = "float",
    fits_five_bits: bool = False,
) -> QuantizedArray:
    """Returns a matrix of dtypes and shapes: its arrays are one zero each, repeated."""
    rows, columns = shape

    def zeros(size: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), size)

    is_4bit = code in ("int4", "uint4")
    code_dtype = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}.get(code, np.uint8)
    groups = (rows, columns // group_size)
    return QuantizedArray(
        zeros((rows, columns // 2 if is_4bit else columns), code_dtype),
        zeros(groups, scale_dtype),
        zeros(groups, scale_dtype) if has_offset else None,
        codebook,
        zeros((columns,), np.int32) if has_perm else None,
        code=code,
        group_size=group_size,
        activations=activations,
        fits_five_bits=fits_five_bits,
    )


def aligned_empty(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    make: Callable[[int, type[np.uint8]], np.ndarray] = np.empty,
) -> np.ndarray:
    """Returns an array that XLA on CPU can adopt without a copy, uninitialised or as made."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = make(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Packs uint8 codes 0..15 `[O, I]` into `[O, I / 2]`, the order of `QuantizedArray.qvalue`.

    Raises:
      ValueError: I is not a multiple of 32.
    """
    rows, columns = codes.shape
    if columns % NIBBLE_CHUNK:
        raise ValueError(f"{columns} columns of 4-bit codes are not a multiple of {NIBBLE_CHUNK}")
    halves = codes.reshape(rows, -1, 2, NIBBLE_CHUNK // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(rows, -1)


def unpack_codes(packed: np.ndarray) -> np.ndarray:
    """Undoes `pack_codes`."""
    halves = packed.reshape(len(packed), -1, 1, NIBBLE_CHUNK // 2)
    codes = np.empty((len(packed), halves.shape[1], 2, NIBBLE_CHUNK // 2), np.uint8)
    np.bitwise_and(halves[:, :, 0], 0xF, out=codes[:, :, 0])
    np.right_shift(halves[:, :, 0], 4, out=codes[:, :, 1])
    return codes.reshape(len(packed), -1)
