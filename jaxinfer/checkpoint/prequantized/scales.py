"""Scales by tensor, row, group or block, and 8-bit weights that are stored as they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.method import SCALE_DTYPES, Matrix, Module, Stored
from jaxinfer.quantized_array import QuantizedArray, abstract_array

Activations = Literal["float", "int8"]


@dataclass(frozen=True)
class Blocks:
    """Rows and columns that share a scale; None stands for all of them."""

    rows: int | None
    columns: int | None

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """How many blocks a matrix has, along O and along I; the last ones may be cut."""
        return -(-shape[0] // self.height(shape)), -(-shape[1] // self.width(shape))

    def height(self, shape: tuple[int, int]) -> int:
        """Rows per block of a matrix."""
        return min(self.rows or shape[0], shape[0])

    def width(self, shape: tuple[int, int]) -> int:
        """Columns per block of a matrix."""
        return min(self.columns or shape[1], shape[1])

    def find(
        self,
        module: Module,
        part: str,
        shape: tuple[int, int],
        dtypes: tuple[str, ...] = SCALE_DTYPES,
    ) -> Stored | None:
        """Returns a part with one value per block, or None; raises CheckpointError."""
        stored = module.find(part, dtypes)
        if stored is None:
            return None
        grid = self.grid(shape)
        # One column of blocks is often stored as a vector, a single block as a scalar.
        allowed = [grid, grid[:1]] if grid[1] == 1 else [grid]
        if stored.shape not in allowed and not (grid == (1, 1) and stored.shape == ()):
            raise stored.error(
                f"has the shape {list(stored.shape)}, not {list(grid)}: one value per "
                f"{self.height(shape)} × {self.width(shape)} block of {list(shape)}"
            )
        return stored

    def need(self, module: Module, part: str, shape: tuple[int, int]) -> Stored:
        """Returns the scales; raises CheckpointError where they are missing."""
        stored = self.find(module, part, shape)
        return module.need(part, SCALE_DTYPES) if stored is None else stored

    def spread(self, values: np.ndarray, shape: tuple[int, int], group_size: int) -> np.ndarray:
        """Returns values by block as values by row and group, `[O, I / group_size]`."""
        height = self.height(shape)
        values = values.reshape(self.grid(shape))
        if height > 1:
            values = np.repeat(values, height, axis=0)[: shape[0]]
        return packing.spread_groups(values, self.width(shape), shape[1], group_size)


def scaled_weight(
    module: Module,
    blocks: Blocks,
    dtype: Literal["I8", "F8_E4M3"],
    *,
    name: str,
    scale_part: str = "weight_scale",
    zero_part: str | None = None,
    activations: Activations = "float",
) -> Matrix:
    """Returns the matrix of a `weight` that holds its int8 or float8_e4m3fn codes as they are.

    Raises:
      CheckpointError: a tensor is missing or not of such a type or shape.
    """
    weight = module.need("weight", (dtype,), (None, None))
    rows, columns = weight.shape
    shape = rows, columns
    scale = blocks.need(module, scale_part, shape)
    zero = None if zero_part is None else blocks.find(module, zero_part, shape, ("I8",))
    group_size = packing.group_of(weight, blocks.width(shape), columns)
    codes = packing.abstract_affine(
        shape,
        8,
        group_size,
        scale.dtype,
        has_offset=zero is not None and activations == "float",
        activations=activations,
    )
    if dtype == "F8_E4M3":
        codes = abstract_array(shape, "fp8", group_size, codes.scale.dtype)
    read = partial(_read, blocks, group_size, activations, weight, scale, zero)
    return Matrix(name, codes, read, is_certain=codes.offset is None)


def _read(
    blocks: Blocks,
    group_size: int,
    activations: Activations,
    weight: Stored,
    scale: Stored,
    zero: Stored | None,
) -> QuantizedArray:
    qvalue = weight.read()
    shape = qvalue.shape[0], qvalue.shape[1]
    scales = blocks.spread(scale.read(), shape, group_size)
    if weight.dtype == "F8_E4M3":
        scales = np.ascontiguousarray(scales)
        return QuantizedArray(qvalue, scales, code="fp8", group_size=group_size)
    zeros = None
    if zero is not None:
        zeros = blocks.spread(zero.read().astype(np.int32) + 128, shape, group_size)
        if activations == "int8" and (zeros != 128).any():
            raise zero.error(
                "zero points of weights with int8 activations are not supported; use a checkpoint "
                "with symmetric weights"
            )
    return packing.affine(qvalue, 8, scales, zeros, group_size, activations=activations)
