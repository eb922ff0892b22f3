"""How much of a prompt a step computes, and whether sequences decode beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxinfer.scheduler.pace import PrefillPace
from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.plan import PlannedRow
from jaxinfer.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepBudget:
    """What is left of the step being planned.

    Attributes:
      tokens: of any kind.
      prefill_tokens: of prompts.
      prefill_work: of prompts too, as `PrefillPace` counts it.
      rows: what is planned.
    """

    tokens: int
    prefill_tokens: int
    prefill_work: float = math.inf
    rows: dict[str, PlannedRow] = field(default_factory=dict)

    @property
    def chunk(self) -> int:
        """Tokens that the next chunk may have."""
        return min(self.tokens, self.prefill_tokens) if self.prefill_work > 0 else 0

    def spend(self, count: int, work: float = 0.0) -> None:
        """Takes a chunk of a prompt from what is left."""
        self.tokens -= count
        self.prefill_tokens -= count
        self.prefill_work -= work


class FreeChunks:
    """Fills a step: whatever decodes, then as much of the prompts as has room.

    Args:
      tables: the pages.
      most: prompt tokens in a step that also decodes.
      pace: what such a step has time for; None for as many tokens always.
      reach: tokens by which a sequence computes ahead of where its window lets go of pages.
    """

    decodes_first = True

    def __init__(self, tables: PageTables, most: int, pace: PrefillPace | None, reach: int) -> None:
        self._most = most
        self._pace = pace
        self._tables = tables
        self._reach = reach

    def limit_prefill(self, budget: StepBudget) -> None:
        """Leaves prompts what they may have beside the decodes that are planned."""
        budget.prefill_tokens = self._most
        if self._pace is not None:
            budget.prefill_work = self._pace.of_step(len(budget.rows))

    def size(self, start: int, end: int, budget: StepBudget) -> int:
        """Tokens of `[start, end)` that the step computes; 0 or less for none."""
        most = budget.chunk
        if self._pace is not None and budget.prefill_work < math.inf:
            most = min(most, self._pace.num_tokens(start, budget.prefill_work))
        return min(end - start, most)

    def spend(self, start: int, count: int, budget: StepBudget) -> None:
        """Takes a chunk from what is left."""
        budget.spend(count, 0.0 if self._pace is None else count * self._pace.of_token(start))

    def has_room(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether a sequence, which holds what was cached of it, finds pages to begin with."""
        # For what it has, and the token it would sample next. Should it need more than there is
        # later, the newest makes room.
        num_tokens = len(sequence.token_ids) + (sequence.num_remaining > 0)
        return self._tables.fits_now(sequence, num_tokens, self._reach)

    def took(self, rows: list[PlannedRow]) -> None:
        """Takes note of what a step was planned to compute."""


class FixedChunks:
    """Computes every token in a way that depends on its own sequence only, to the last bit.

    What a kernel's sums add up to in which order depends on how many tokens of a sequence are in a
    step. So prompts are cut at multiples of `size`, and a chunk is computed whole or not at all;
    decodes have steps of their own; and as a sequence's output, computed as a prompt, would come
    out otherwise, none is preempted: it begins only when the pages of its whole length are there.

    Where there are both, steps with prompts and steps that decode take turns: a sequence that
    decodes waits for one other step at most.

    Args:
      tables: the pages.
      size: tokens of a chunk.
      reach: as of `FreeChunks`.

    Raises:
      ValueError: a chunk would end within a page.
    """

    def __init__(self, tables: PageTables, size: int, reach: int) -> None:
        if size < 1 or size % tables.page_size:
            raise ValueError(
                f"chunk_tokens ({size}) must be a multiple of the page size ({tables.page_size})"
            )
        self.decodes_first = False
        self._tables = tables
        self._size = size
        self._reach = reach

    def size(self, start: int, end: int, budget: StepBudget) -> int:
        """Tokens of `[start, end)` that the step computes: a whole chunk, or 0."""
        count = min(end, (start // self._size + 1) * self._size) - start
        return count if count <= budget.chunk else 0

    def limit_prefill(self, budget: StepBudget) -> None:
        """Leaves prompts nothing beside decodes."""
        budget.prefill_tokens = 0

    def spend(self, start: int, count: int, budget: StepBudget) -> None:
        """Takes a chunk from what is left."""
        budget.spend(count)

    def has_room(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether a sequence finds pages to its end, whatever those that run come to need."""
        return self._tables.fits_beside(sequence, running, self._reach)

    def took(self, rows: list[PlannedRow]) -> None:
        """Takes note of what a step was planned to compute: the next one's turn is the other's."""
        if rows:
            self.decodes_first = not rows[0].is_decode
