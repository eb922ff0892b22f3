"""Which rows of a step get drafts to verify, and what becomes of those that were wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxinfer.scheduler.drafter import Drafter
from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.plan import PlannedRow, StepPlan
from jaxinfer.scheduler.sequence import Sequence, SequenceStatus


class Drafts:
    """Speculative decoding of the sequences that have a drafter.

    A row with drafts computes its last token and the drafts at once, and samples after each of
    them; what it sampled counts up to the first that is not the draft. Its next step can only be
    planned then: none of its tokens may be in flight.

    Args:
      tables: the pages.
      max_tokens: of a step up to which it may have drafts.
    """

    def __init__(self, tables: PageTables, max_tokens: int) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self.num_accepted = 0
        self._tables = tables
        self._max_tokens = max_tokens

    def is_waited_for(self, running: list[Sequence]) -> bool:
        """Whether the next step should be planned once nothing is in flight, to have drafts.

        All rows wait, so that one step goes on with all of them.
        """
        return (
            len(running) < self._max_tokens
            and all(sequence.is_decoding for sequence in running)
            and any(
                sequence.is_verifying or (sequence.num_in_flight and sequence.has_drafts)
                for sequence in running
            )
        )

    def add(self, plan: StepPlan, rows: dict[str, PlannedRow], most: int) -> None:
        """Adds drafts to rows that decode: `most` at most, on pages that nobody else wants."""
        if len(rows) >= self._max_tokens:
            return
        drafted = [
            row
            for row in rows.values()
            if row.is_decode and row.sequence.has_drafts and not row.sequence.num_in_flight
        ]
        room = min(most, self._max_tokens - sum(row.num_queries for row in rows.values()))
        for index, row in enumerate(drafted):
            drafts = self._propose(row, room // (len(drafted) - index))
            if not drafts:
                continue
            sequence, num_tokens = row.sequence, 1 + len(drafts)
            plan.page_updates += self._tables.extend(sequence, row.start + num_tokens)
            del rows[sequence.seq_id]  # decodes come first
            rows[sequence.seq_id] = replace(
                row,
                num_tokens=num_tokens,
                token_ids=(sequence.token_ids[-1], *drafts),
                num_sampled=num_tokens,
            )
            sequence.is_verifying = True
            room -= len(drafts)

    def _propose(self, row: PlannedRow, most: int) -> tuple[int, ...]:
        sequence = row.sequence
        most = min(most, sequence.num_remaining - 1)
        if sequence.drafter is None or most < 1:
            return ()
        drafts = sequence.drafter.propose(most)
        while drafts and not self._tables.can_extend(sequence, row.start + 1 + len(drafts)):
            drafts = drafts[:-1]
        return drafts

    def settle(self, row: PlannedRow, drafter: Drafter, token_ids: Iterable[int]) -> None:
        """Takes what a row sampled: forgets what it computed of wrong drafts.

        Args:
          drafter: the sequence's.
        """
        sequence, ids = row.sequence, list(token_ids)
        if row.num_drafts:
            sequence.is_verifying = False
            num_accepted = max(0, len(ids) - 1)
            self.num_drafts += 1
            self.num_tokens += row.num_drafts
            self.num_accepted += num_accepted
            drafter.learn(row.num_drafts, num_accepted)
            if sequence.status is SequenceStatus.RUNNING:  # not preempted since
                sequence.num_computed = row.start + 1 + num_accepted
                self._tables.shrink(sequence, sequence.num_computed)
        drafter.extend(ids)
