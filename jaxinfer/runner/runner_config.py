"""What decides the shapes of an engine's programs."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.runner.kv_cache import CacheSpec


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything that decides the shape of a program.

    Attributes:
      max_num_seqs, max_num_batched_tokens, max_model_len: limits of a step and of a sequence.
      decode_steps: decode steps in one dispatch, of up to `bulk_rows` rows.
      cache: shape of the KV cache.
      num_pages: pages in the pool, the trash page included.
      num_groups: KV groups.
      verifies: steps may have drafts.
      one_rung: one program for all decode steps, and one for all others.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    decode_steps: int
    cache: CacheSpec
    num_pages: int
    num_groups: int
    bulk_rows: int | None = None  # of all rows
    verifies: bool = False
    one_rung: bool = False

    @property
    def num_bulk_rows(self) -> int:
        """Rows up to which a dispatch may have several decode steps."""
        rows = self.max_num_seqs if self.bulk_rows is None else self.bulk_rows
        return rows if self.decode_steps > 1 else 0

    @property
    def pages_per_row(self) -> int:
        """Logical pages of the longest sequence."""
        return -(-self.max_model_len // self.cache.page_size)
