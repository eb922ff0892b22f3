"""What every implementation of paged attention is told about a step's rows and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Leaf: TypeAlias = Any  # an Array, or whatever a transformation puts in its place in the pytree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """One step's rows and pages; a pytree, the same for every layer and implementation.

    Shapes use B rows, T query tokens, M pages per row and C KV groups (layers that share one
    window share one page table). All arrays are int32.

    - Rows are ordered decodes first; rows from `num_seqs` on are padding.
    - Tokens of a row are consecutive and rows follow each other: row b owns the tokens
      `[cu_q_lens[b], cu_q_lens[b + 1])`, the last of which sits at position `kv_lens[b] - 1`.
    - Page 0 is trash: padding is written there and nothing live is ever read from it.

    Attributes:
      num_decodes: `[]` rows `[0, num_decodes)` have exactly one query token.
      num_seqs: `[]` rows in use.
      kv_lens: `[B]` keys of each row, this step's tokens included; 0 for padding rows.
      cu_q_lens: `[B + 1]` prefix sums of the rows' query lengths; constant from `num_seqs` on.
      slot_mapping: `[C, T]` slot (page * page_size + offset) each token is written to; padding
        and dead rows have a slot of page 0.
      page_table: `[C, B, M]` physical page of each logical page; unused entries are 0.
      is_decode: static; True promises T == B and that token b is the one query of row b.
    """

    num_decodes: Leaf
    num_seqs: Leaf
    kv_lens: Leaf
    cu_q_lens: Leaf
    slot_mapping: Leaf
    page_table: Leaf
    is_decode: bool = field(metadata={"static": True})

    def query_tiles(self, num_tokens: int, length: int) -> tuple[Leaf, Leaf, Leaf]:
        """Returns row and first token of tiles that cover all rows past `num_decodes`.

        Made outside a kernel or loop, where XLA shares the list between layers.

        Args:
          num_tokens: T.
          length: tokens of a tile; a row's last tile may have fewer.

        Returns:
          int32 `[tiles]` rows and first tokens, and how many of the tiles there really are.
        """
        num_rows = self.kv_lens.shape[0]
        row = jnp.arange(num_rows, dtype=jnp.int32)
        is_tiled = (row >= self.num_decodes) & (row < self.num_seqs)
        counts = jnp.where(is_tiled, (jnp.diff(self.cu_q_lens) + length - 1) // length, 0)
        ends = jnp.cumsum(counts)
        tile = jnp.arange(num_rows + num_tokens // length, dtype=jnp.int32)
        tile_row = jnp.searchsorted(ends, tile, side="right", method="compare_all")
        tile_row = jnp.minimum(tile_row, num_rows - 1)
        begin = self.cu_q_lens[tile_row] + (tile - (ends - counts)[tile_row]) * length
        return tile_row, begin, ends[-1]
