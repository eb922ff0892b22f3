"""Which of a failed step's sequences made it fail: they run again in halves until it is alone."""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.scheduler.plan import PlannedRow
from jaxinfer.scheduler.sequence import Sequence, SequenceStatus


class Quarantine:
    """Sequences suspected of making steps fail, in groups of which one at a time is tested.

    Only the group under test may run. A sequence has passed once a step succeeded that computed
    what the failed one was to compute; a group whose sequences have all passed or ended makes room
    for the next. A group that fails is tested again as two halves, and one sequence that fails
    alone while it is tested is the culprit. Of n sequences in the first failed step, k culprits
    cost at most k·(log2 n + 2) failed steps; a step that fails once costs nobody anything.
    """

    def __init__(self) -> None:
        self._groups: list[list[Sequence]] = []  # the last one is under test
        # Tokens of a suspect that must have been computed before it has passed.
        self._goals: dict[Sequence, int] = {}

    @property
    def is_active(self) -> bool:
        """Whether any sequence is suspected."""
        return any(self._is_suspect(sequence) for group in self._groups for sequence in group)

    @property
    def is_watching(self) -> bool:
        """Whether steps that succeed mean anything to it."""
        return bool(self._goals)

    def allows(self, sequence: Sequence) -> bool:
        """Whether the sequence may run now."""
        return not self._groups or sequence in self._groups[-1]

    def fail(self, rows: Iterable[PlannedRow]) -> Sequence | None:
        """Takes note of a failed step; returns the culprit once it is known."""
        rows = [row for row in rows if row.sequence.status is not SequenceStatus.FINISHED]
        sequences = [row.sequence for row in rows]
        tested = self._groups.pop() if self._groups else []
        if sequences == tested and len(sequences) == 1:
            self._goals.pop(sequences[0], None)
            return sequences[0]
        for row in rows:
            goal = row.start + row.num_tokens
            self._goals[row.sequence] = max(goal, self._goals.get(row.sequence, 0))
        middle = (len(sequences) + 1) // 2
        others = [sequence for sequence in tested if sequence not in sequences]
        parts = (others, sequences[middle:], sequences[:middle])
        self._groups += [part for part in parts if part]
        return None

    def confirm(self, row: PlannedRow) -> None:
        """Takes note of a row whose step succeeded."""
        goal = self._goals.get(row.sequence)
        if goal is not None and row.start + row.num_tokens >= goal:
            del self._goals[row.sequence]

    def advance(self) -> bool:
        """Leaves groups behind that have passed; returns whether another is under test now."""
        before = len(self._groups)
        while self._groups and not any(map(self._is_suspect, self._groups[-1])):
            self._groups.pop()
        if not self._groups:
            self._goals.clear()
        return 0 < len(self._groups) < before

    def _is_suspect(self, sequence: Sequence) -> bool:
        return sequence in self._goals and sequence.status is not SequenceStatus.FINISHED
