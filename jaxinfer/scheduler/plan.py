"""What one step computes, as plain data: the scheduler's output and the runner's input."""

from __future__ import annotations

from dataclasses import dataclass, field

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
      samples: the last position samples a token.
      score_from: first position whose next prompt token is to be scored; None for no scoring.
      admission: which of the sequence's admissions it belongs to, counted from 1.
      num_drafts: how many of `token_ids`, the last ones, are guesses: the position before each
        samples too, and the row ends where a sample is not the guess.
      embeds: the hidden state of the last position is wanted.
    """

    sequence: Sequence
    row: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    samples: bool
    score_from: int | None = None
    admission: int = 0
    num_drafts: int = 0
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
    def num_sampled(self) -> int:
        """Tokens the row samples at most."""
        if not self.samples:
            return 0
        return 1 + self.num_drafts if self.token_ids else self.num_tokens


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
        return all(row.is_decode for row in self.rows)

    @property
    def embeds(self) -> bool:
        """Whether any row wants a hidden state."""
        return any(row.embeds for row in self.rows)

    @property
    def num_queries(self) -> int:
        """Tokens a ragged step computes."""
        return sum(row.num_queries for row in self.rows)
