"""How a TPU holds a cache's elements: in rows of 128 32-bit words, which nothing pads or reorders.

XLA:TPU chooses an array's device layout by its shape. For `[..., K, 2, H]` of int8, for H = 80 and
for three packed heads it puts another axis last than a Pallas call demands, and every call copies
the cache. Arrays `[P, page, R, 1, 128]` of 32 bits are row-major and dense on every generation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Real, Shaped

from kernels.paged_attention.metadata import Leaf

LANES = 128
WORD_DTYPES = {"float32": "float32", "bfloat16": "uint32", "int8": "int32"}
"""What holds the elements of each dtype that a TPU cache may have."""
_PER_WORD = {"float32": 1, "uint32": 2, "int32": 4}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WordsKV:
    """Keys and values (of a quantized cache: codes) as a TPU holds them; a pytree.

    Attributes:
      words: `[P, page, R, 1, 128]`, each token's `R` rows as `RowLayout` says. Over a mesh the
        rows of each device follow those of the one before.
      num_kv_heads, head_dim: static; of one device's share.
    """

    words: Leaf
    num_kv_heads: int = field(metadata={"static": True})
    head_dim: int = field(metadata={"static": True})

    @property
    def layout(self) -> RowLayout:
        """Where a token's elements lie in its rows."""
        return RowLayout(self.num_kv_heads, self.head_dim, _PER_WORD[self.words.dtype.name])


class RowLayout(NamedTuple):
    """Where one token's elements lie in its rows of words.

    Heads take `head_lanes` lanes each, side by side; 128 lanes are a tile. The key and value
    tiles K0 V0 K1 V1 ... share words: the tiles `r * per_word ...` are row r's elements, lowest
    bits first.

    Attributes:
      num_kv_heads, head_dim: of the cache.
      per_word: elements in a word: 1, 2 or 4.
    """

    num_kv_heads: int
    head_dim: int
    per_word: int

    @property
    def head_lanes(self) -> int:
        """Lanes of a head: a divisor of 128, or a multiple of it."""
        return self.head_dim if LANES % self.head_dim == 0 else _up(self.head_dim, LANES)

    @property
    def unit_tiles(self) -> int:
        """Tiles of a unit, the heads whose scores one matrix product gives."""
        return -(-self.head_lanes // LANES)

    @property
    def unit_heads(self) -> int:
        """Heads of a unit: more than one where they share a tile."""
        return max(LANES // self.head_lanes, 1)

    @property
    def row_heads(self) -> int:
        """Heads of a unit that may exist."""
        return min(self.unit_heads, self.num_kv_heads)

    @property
    def group_units(self) -> int:
        """Units of a group, the smallest number of them that fills whole rows."""
        return self.per_word // math.gcd(self.per_word, 2 * self.unit_tiles)

    @property
    def group_rows(self) -> int:
        """Rows of words of a group."""
        return 2 * self.unit_tiles * self.group_units // self.per_word

    @property
    def num_groups(self) -> int:
        """Groups of a token; the last one may hold units and heads that do not exist."""
        return -(-self.num_kv_heads // (self.unit_heads * self.group_units))

    @property
    def num_units(self) -> int:
        """Units of a token, those that only fill the last group included."""
        return self.num_groups * self.group_units

    @property
    def num_rows(self) -> int:
        """Rows of words of a token."""
        return self.num_groups * self.group_rows


def element_dtype(word: DTypeLike) -> str:
    """Returns the dtype of the elements that words of a dtype hold."""
    return next(name for name, held in WORD_DTYPES.items() if held == jnp.dtype(word).name)


def row_layout(num_kv_heads: int, head_dim: int, dtype: DTypeLike) -> RowLayout:
    """Returns the layout of a cache of `dtype` elements, which must be one of `WORD_DTYPES`."""
    return RowLayout(num_kv_heads, head_dim, 4 // jnp.dtype(dtype).itemsize)


def pack_rows(elements: Real[Array, "T K 2 H"]) -> Shaped[Array, "T R L"]:
    """Returns tokens' keys and values as their rows of words."""
    num_tokens, num_kv_heads, _, head_dim = elements.shape
    layout = row_layout(num_kv_heads, head_dim, elements.dtype)
    heads = layout.num_units * layout.unit_heads
    padding = ((0, 0), (0, heads - num_kv_heads), (0, 0), (0, layout.head_lanes - head_dim))
    padded = jnp.pad(elements, padding)
    shape = (num_tokens, layout.num_units, layout.unit_heads, 2, layout.unit_tiles, -1)
    tiles = padded.reshape(shape).transpose(0, 1, 4, 3, 2, 5)
    if layout.per_word == 1:
        return tiles.reshape(num_tokens, layout.num_rows, LANES)
    tiles = tiles.reshape(num_tokens, layout.num_rows, layout.per_word, LANES)
    word = WORD_DTYPES[elements.dtype.name]
    return lax.bitcast_convert_type(jnp.swapaxes(tiles, 2, 3), jnp.dtype(word))


def unpack_rows(
    words: Shaped[Array, "*tokens R L"], num_kv_heads: int, head_dim: int
) -> Real[Array, "*tokens K 2 H"]:
    """Undoes `pack_rows`."""
    dtype = element_dtype(words.dtype)
    layout = row_layout(num_kv_heads, head_dim, dtype)
    tokens = words.shape[:-2]
    words = words.reshape(-1, layout.num_rows, LANES)
    if layout.per_word > 1:
        words = jnp.swapaxes(lax.bitcast_convert_type(words, jnp.dtype(dtype)), 2, 3)
    tiles = words.reshape(
        -1, layout.num_units, layout.unit_tiles, 2, layout.unit_heads, LANES // layout.unit_heads
    )
    heads = tiles.transpose(0, 1, 4, 3, 2, 5)
    heads = heads.reshape(-1, layout.num_units * layout.unit_heads, 2, layout.head_lanes)
    return heads[:, :num_kv_heads, :, :head_dim].reshape(*tokens, num_kv_heads, 2, head_dim)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
