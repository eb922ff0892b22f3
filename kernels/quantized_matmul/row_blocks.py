"""Arrays of a weight with the rows of each block interleaved, as `Layout.row_block` says.

Arrays keep their shapes. Numpy's stay numpy's, and under jit everything is XLA's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

Leaf: TypeAlias = Any  # an Array, or numpy's

COLUMNS = 32
"""Rows are whole chunks of so many columns."""

_MIDDLES_EXCHANGED = (0, 2, 1, 3)
_REGISTER_BYTES = 64  # four codes of each of sixteen rows


def interleave_codes(codes: Leaf, block: int) -> Leaf:
    """Returns codes `[O, bytes]`: of each block four bytes of every row, then the next four."""
    parts = codes.reshape(-1, block, codes.shape[1] // 4, 4)
    return parts[..., _MIDDLES_EXCHANGED].swapaxes(1, 2).reshape(codes.shape)


def interleave_groups(groups: Leaf, block: int) -> Leaf:
    """Returns scales or offsets `[O, groups]`: of each block a group's of every row."""
    return groups.reshape(-1, block, groups.shape[1]).swapaxes(1, 2).reshape(groups.shape)


def pack_five_bits(codes: Leaf) -> Leaf:
    """Packs interleaved codes 0..31 `[O, I]`: see cpu_blocks_five_bits.h; `[O, I * 5 / 8]`."""
    registers = codes.astype("uint8").reshape(-1, 8, _REGISTER_BYTES)
    halves = registers[:, :4] & 15 | registers[:, 4:] << 4
    fifths = registers[:, 0] >> 4
    for j in range(1, 8):
        fifths = fifths | registers[:, j] >> 4 << j
    chunks = [halves.reshape(len(registers), -1), fifths]
    package = np if isinstance(codes, np.ndarray) else jnp
    return package.concatenate(chunks, axis=1).reshape(len(codes), -1)


def take_five_bits(packed: Leaf, rows: Int[Array, " T"], block: int) -> Array:
    """Returns rows of packed codes of five bits as numbers 0..31 `[T, I]`; they must exist."""
    width = packed.shape[1] // 20  # chunks of COLUMNS
    blocks = jnp.asarray(packed).reshape(-1, width, 5, block, 4)
    of_rows = blocks[rows // block, :, :, rows % block]  # [T, chunks, 5, 4]
    halves, fifths = of_rows[:, :, :4], of_rows[:, :, 4:]
    low = jnp.concatenate([halves & 15, halves >> 4], axis=2)
    fifth = fifths >> jnp.arange(8, dtype=jnp.uint8)[None, None, :, None] & 1
    return (low | fifth << 4)[..., _MIDDLES_EXCHANGED].reshape(len(rows), -1)


def take_codes(codes: Leaf, rows: Int[Array, " T"], block: int) -> Array:
    """Returns rows of interleaved codes as they were; they must exist."""
    return _take(codes, rows, block, 4)[..., _MIDDLES_EXCHANGED].reshape(len(rows), -1)


def take_groups(groups: Leaf, rows: Int[Array, " T"], block: int) -> Array:
    """Returns rows of interleaved scales or offsets as they were; they must exist."""
    return _take(groups, rows, block, 1)[..., 0]


def _take(array: Leaf, rows: Array, block: int, width: int) -> Array:
    blocks = jnp.asarray(array).reshape(-1, array.shape[1] // width, block, width)
    return blocks[rows // block, :, rows % block]
