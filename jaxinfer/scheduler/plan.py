"""What one step computes, and what came of it: plain data between the scheduler and the runner."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jaxinfer.outputs import TokenLogprob
from jaxinfer.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageUpdate:
    """One changed entry of the device's page table."""

    group: int
    row: int
    index: int
    page: int


# Made for every row of every step: frozen, it would take three times as long.
@dataclass(slots=True)
class PlannedRow:
    """One sequence's share of a step.

    Attributes:
      sequence: whose tokens these are.
      row: its slot in the row state and the page table.
      start: position of the first token.
      num_tokens: tokens computed; for a decode, how many steps at most.
      token_ids: their ids; empty for a decode, whose token is on the device.
      num_sampled: tokens it samples at most: as many as it computes of a decode; of a prompt, one
        after its last position, or none; and as many before that as there are drafts.
      score_from: first position whose next prompt token is to be scored; None for no scoring.
      admission: which of the sequence's admissions it belongs to, counted from 1.
      embeds: the hidden state of the last position is wanted.
    """

    sequence: Sequence
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    num_sampled: int
    score_from: int | None = None
    admission: int = 0
    embeds: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether the row continues from the token the device sampled last."""
        return not self.token_ids

    @property
    def num_queries(self) -> int:
        """Tokens the row brings to a ragged step; a decode brings the one the device holds."""
        return 1 if self.is_decode else self.num_tokens

    @property
    def num_drafts(self) -> int:
        """How many of `token_ids`, the last ones, are guesses.

        The position before each samples too, and the row ends where a sample is not the guess.
        """
        return max(0, self.num_sampled - 1) if self.token_ids else 0


# Made for every row of every step, as well.
@dataclass(slots=True)
class RowResult:
    """What a step produced for one planned row.

    Attributes:
      token_ids: sampled ids, oldest first.
      logprobs: one per sampled id, if asked for.
      prompt_logprobs: one per scored prompt position, in order.
      finite: false if the model's logits, or its hidden state, were not.
      hidden: the final hidden state of the row's last token, if asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: SequenceOf[TokenLogprob] = ()
    finite: bool = True
    hidden: array[float] | None = None


@dataclass(slots=True)
class StepPlan:
    """One dispatch to the device.

    Attributes:
      rows: decodes first.
      admitted: sequences whose row state, and whose row of the page table, must be rebuilt before
        the step.
      page_updates: entries of the page table that changed since.
      num_steps: decode steps in one dispatch; 1 unless every row is a decode.
    """

    rows: list[PlannedRow] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    num_steps: int = 1

    @property
    def num_decodes(self) -> int:
        """Rows that continue from a sampled token."""
        return sum(row.is_decode for row in self.rows)

    @property
    def is_decode_only(self) -> bool:
        """Whether the step has neither prompt tokens nor drafts."""
        return not self.rows or self.rows[-1].is_decode  # decodes come first

    @property
    def wants_top(self) -> bool:
        """Whether any row wants the best tokens beside those that were sampled, or scored."""
        return any(row.sequence.logprobs or row.sequence.prompt_logprobs for row in self.rows)

    @property
    def embeds(self) -> bool:
        """Whether any row wants a hidden state."""
        return any(row.embeds for row in self.rows)

    @property
    def num_queries(self) -> int:
        """Tokens a ragged step computes."""
        return sum(row.num_queries for row in self.rows)
