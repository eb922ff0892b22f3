"""The masks of a step: which tokens each of its rows with a grammar may sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.request import TokenMatcher
from jaxinfer.scheduler.plan import PlannedRow, RowResult, StepPlan
from jaxinfer.scheduler.sequence import Sequence, SequenceStatus

Failures = list[tuple[Sequence, Exception]]
"""Sequences that their grammar can lead no further, with what is wrong."""


@dataclass(slots=True)
class Ended:
    """Sequences that end by their grammar.

    Attributes:
      complete: their text matches, and nothing may follow.
      failed: they can follow it no further.
    """

    complete: list[Sequence] = field(default_factory=list)
    failed: Failures = field(default_factory=list)


class StepMasks:
    """The matchers of all completions that have a grammar, by the name of their sequence.

    What may come next depends on a completion's tokens alone, so that nothing is to be done where
    it is preempted, or a step fails.
    """

    def __init__(self) -> None:
        self._matchers: dict[str, TokenMatcher] = {}

    def add(self, seq_id: str, matcher: TokenMatcher) -> None:
        """Takes a completion that begins."""
        self._matchers[seq_id] = matcher

    def drop(self, seq_id: str) -> None:
        """Forgets one that has ended."""
        self._matchers.pop(seq_id, None)

    def are_needed(self, plan: StepPlan) -> bool:
        """Whether any row of a step has one."""
        return any(True for _ in self._rows(plan))

    def must_wait(self, plan: StepPlan) -> bool:
        """Whether any depends on a token that an earlier step is still to sample."""
        return any(row.sequence.num_in_flight > row.num_sampled for _, row, _ in self._rows(plan))

    def fill(self, plan: StepPlan, masks: np.ndarray) -> Failures:
        """Writes the mask of each row that has a grammar; returns those for which it cannot.

        Args:
          plan: of a step before which all tokens of those rows are known.
          masks: one for each row of the plan, all ones.
        """
        failures: Failures = []
        for index, row, matcher in self._rows(plan):
            try:
                matcher.fill(masks[index])
            except Exception as error:
                failures.append((row.sequence, error))
        return failures

    def advance(self, results: Iterable[tuple[PlannedRow, RowResult]]) -> Ended:
        """Takes what a step sampled."""
        ended = Ended()
        for row, result in results if self._matchers else ():
            sequence = row.sequence
            matcher = self._matchers.get(sequence.seq_id)
            if matcher is None or not result.token_ids or sequence.stop_token is not None:
                continue
            try:
                for token_id in result.token_ids:
                    matcher.advance(token_id)
            except Exception as error:
                ended.failed.append((sequence, error))
                continue
            if matcher.is_complete:
                ended.complete.append(sequence)
        return ended

    def _rows(self, plan: StepPlan) -> Iterator[tuple[int, PlannedRow, TokenMatcher]]:
        for index, row in enumerate(plan.rows) if self._matchers else ():
            matcher = self._matchers.get(row.sequence.seq_id)
            is_over = row.sequence.status is SequenceStatus.FINISHED
            if matcher is not None and row.num_sampled and not is_over:
                yield index, row, matcher
