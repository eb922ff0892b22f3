"""Arrays of a weight with the rows of each block interleaved, as `Layout.row_block` says.

Arrays keep their shapes. Numpy's stay numpy's, and under jit everything is XLA's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

Leaf: TypeAlias = Any  # an Array, or numpy's

COLUMNS = 32
"""Rows are whole chunks of so many columns."""

_MIDDLES_EXCHANGED = (0, 2, 1, 3)


def interleave_codes(codes: Leaf, block: int) -> Leaf:
    """Returns codes `[O, bytes]`: of each block four bytes of every row, then the next four."""
    parts = codes.reshape(-1, block, codes.shape[1] // 4, 4)
    return parts[..., _MIDDLES_EXCHANGED].swapaxes(1, 2).reshape(codes.shape)


def interleave_groups(groups: Leaf, block: int) -> Leaf:
    """Returns scales or offsets `[O, groups]`: of each block a group's of every row."""
    return groups.reshape(-1, block, groups.shape[1]).swapaxes(1, 2).reshape(groups.shape)


def take_codes(codes: Leaf, rows: Int[Array, " T"], block: int) -> Array:
    """Returns rows of interleaved codes as they were; they must exist."""
    return _take(codes, rows, block, 4)[..., _MIDDLES_EXCHANGED].reshape(len(rows), -1)


def take_groups(groups: Leaf, rows: Int[Array, " T"], block: int) -> Array:
    """Returns rows of interleaved scales or offsets as they were; they must exist."""
    return _take(groups, rows, block, 1)[..., 0]


def _take(array: Leaf, rows: Array, block: int, width: int) -> Array:
    blocks = jnp.asarray(array).reshape(-1, array.shape[1] // width, block, width)
    return blocks[rows // block, :, rows % block]
