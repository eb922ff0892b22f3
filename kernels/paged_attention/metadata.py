"""What every implementation of paged attention is told about a step's rows and pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

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
