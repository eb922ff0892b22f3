"""How much one step may hold, and how far ahead of its results steps are planned."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.scheduler.pace import PrefillPace


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
      max_num_seqs: sequences running together.
      max_num_batched_tokens: tokens in a step.
      max_prefill_chunk_tokens: prompt tokens in a step that also decodes.
      prefill_pace: what such a step has time for; None for as many tokens always.
      max_decode_steps_before_prefill: decode-only steps that may be dispatched in bulk, and so
        pass before a request that arrives meanwhile is looked at.
      decode_steps: decode steps in one dispatch when nothing waits and at most `bulk_rows` run.
      pipeline_depth: steps dispatched before the results of the oldest are read, 0 or 1.
      num_draft_tokens: drafts of one row at most; 0 for no speculation.
      max_tokens_with_drafts: tokens up to which a step may have drafts.
      chunk_tokens: tokens of a chunk where prompts are to be cut at multiples of it and computed in
        steps without decodes (see `FixedChunks`); None for as many as fit.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int
    max_decode_steps_before_prefill: int = 8
    decode_steps: int = 1
    bulk_rows: int | None = None  # of all rows
    pipeline_depth: int = 0
    num_draft_tokens: int = 0
    max_tokens_with_drafts: int = 0
    chunk_tokens: int | None = None
    prefill_pace: PrefillPace | None = None

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token a step"
            )
        if self.chunk_tokens is None:
            return
        if self.chunk_tokens > self.max_num_batched_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) must be at most max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): chunks are computed whole"
            )
        if self.bulk_steps(1) > 1 or self.num_draft_tokens:
            raise ValueError(
                f"chunk_tokens ({self.chunk_tokens}) goes with one decode step at a time and no "
                f"drafts, not with {self.bulk_steps(1)} and {self.num_draft_tokens}"
            )

    def bulk_steps(self, num_rows: int) -> int:
        """Decode steps in one dispatch of so many rows; those in flight stay within the bound."""
        if self.bulk_rows is not None and num_rows > self.bulk_rows:
            return 1
        bound = self.max_decode_steps_before_prefill // (self.pipeline_depth + 1)
        return max(1, min(self.decode_steps, bound))

    @property
    def most_tokens_of_a_row(self) -> int:
        """Tokens of one sequence that one dispatch may compute."""
        return max(self.chunk_tokens or self.max_num_batched_tokens, self.bulk_steps(1))
