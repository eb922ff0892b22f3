"""Continuous batching: each step is one token budget, spent on running sequences, then on waiting.

A prompt, a chunk of a prompt and a decode are the same thing with different token counts.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.plan import PlannedRow, StepPlan
from jaxinfer.scheduler.sequence import Sequence, SequenceFinish, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step may hold.

    Attributes:
      max_num_seqs: sequences running together.
      max_num_batched_tokens: tokens in a step.
      max_prefill_chunk_tokens: prompt tokens in a step that also decodes.
      max_decode_steps_before_prefill: decode-only steps that may be dispatched in bulk, and so
        pass before a request that arrives meanwhile is looked at.
      decode_steps: decode steps in one dispatch when nothing waits and at most `bulk_rows` run.
      pipeline_depth: steps dispatched before the results of the oldest are read, 0 or 1.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk_tokens: int
    max_decode_steps_before_prefill: int = 8
    decode_steps: int = 1
    bulk_rows: int | None = None  # of all rows
    pipeline_depth: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token a step"
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
        return max(self.max_num_batched_tokens, self.bulk_steps(1))


@dataclass(slots=True)
class SequenceUpdate:
    """What one finished step means for one sequence."""

    sequence: Sequence
    planned: PlannedRow
    token_ids: list[int]


@dataclass(slots=True)
class _Budget:
    """Tokens left in the step being planned."""

    tokens: int
    prefill_tokens: int
    rows: dict[str, PlannedRow] = field(default_factory=dict)

    def chunk(self, remaining: int) -> int:
        return min(remaining, self.tokens, self.prefill_tokens)


class Scheduler:
    """Decides each step from the sequences' token counts.

    `schedule` counts a dispatched token as computed. `update` confirms what the step sampled;
    tokens of sequences that ended meanwhile are dropped there.
    """

    def __init__(self, limits: SchedulerLimits, tables: PageTables) -> None:
        self.limits = limits
        self.tables = tables
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    # Arrivals and departures.

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits the pool when it is alone."""
        return self.tables.fits_empty(num_tokens, self.limits.most_tokens_of_a_row)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
          ValueError: it could never be finished within the page pool.
        """
        longest = sequence.prompt_len + sequence.stop.max_tokens
        if not self.fits(longest):
            raise ValueError(
                f"{sequence.seq_id} may reach {longest} tokens, but the KV pool holds "
                f"{self.tables.pools[0].num_total * self.tables.page_size}"
            )
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: SequenceFinish) -> None:
        """Ends a sequence now; tokens of it that are in flight will be dropped."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = sequence.finish_reason or reason

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.waiting or self.running)

    # One step.

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or returns None when nothing can be computed now."""
        plan = StepPlan(num_steps=self._bulk_steps())
        budget = _Budget(self.limits.max_num_batched_tokens, self.limits.max_num_batched_tokens)
        preempted = self._plan_decodes(plan, budget)
        if budget.rows:
            budget.prefill_tokens = self.limits.max_prefill_chunk_tokens
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.RUNNING and not sequence.is_decoding:
                preempted |= self._plan_prefill(sequence, plan, budget)
        if not preempted:
            self._admit(plan, budget)
        plan.rows = list(budget.rows.values())
        for row in plan.rows:
            self._advance(row)
        return plan if plan.rows else None

    def update(
        self, plan: StepPlan, sampled: Mapping[str, SequenceOf[int]]
    ) -> list[SequenceUpdate]:
        """Takes the ids a step sampled, by `seq_id`; ends the sequences they complete."""
        updates = []
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_in_flight -= row.num_sampled
            if sequence.status is SequenceStatus.FINISHED:
                continue
            token_ids = list(sampled[sequence.seq_id]) if row.samples else []
            sequence.token_ids.extend(token_ids)
            self._finish_if_complete(row, token_ids)
            updates.append(SequenceUpdate(sequence, row, token_ids))
        return updates

    # Planning.

    def _bulk_steps(self) -> int:
        """Decode steps to dispatch at once: more than one only when nothing else could run."""
        steps = self.limits.bulk_steps(len(self.running))
        if steps == 1 or self.waiting:
            return 1
        if all(sequence.is_decoding and sequence.steps_in_bulk for sequence in self.running):
            return steps
        return 1

    def _plan_decodes(self, plan: StepPlan, budget: _Budget) -> bool:
        preempted = False
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by an older one in this very loop
            if not (sequence.is_decoding and sequence.is_schedulable):
                continue
            steps = min(plan.num_steps, sequence.num_remaining)
            preempted |= not self._make_room(sequence, sequence.num_computed + steps, budget)
            if sequence.status is SequenceStatus.RUNNING:
                plan.page_updates += self.tables.extend(sequence, sequence.num_computed + steps)
                start = sequence.num_computed
                budget.rows[sequence.seq_id] = PlannedRow(
                    sequence, sequence.row, start, steps, (), samples=True
                )
                budget.tokens -= 1
        return preempted

    def _plan_prefill(self, sequence: Sequence, plan: StepPlan, budget: _Budget) -> bool:
        """Plans the next chunk of a prompt; returns whether anything was preempted for it."""
        count = budget.chunk(len(sequence.token_ids) - sequence.num_computed)
        if count <= 0 or sequence.num_in_flight:
            return False
        start, end = sequence.num_computed, sequence.num_computed + count
        self.tables.release_outside_window(sequence)
        calm = self._make_room(sequence, end, budget)
        if sequence.status is SequenceStatus.RUNNING:
            plan.page_updates += self.tables.extend(sequence, end)
            budget.rows[sequence.seq_id] = PlannedRow(
                sequence,
                sequence.row,
                start,
                count,
                tuple(sequence.token_ids[start:end]),
                samples=end == len(sequence.token_ids) and sequence.num_remaining > 0,
                score_from=self._score_from(sequence, start, end),
            )
            budget.tokens -= count
            budget.prefill_tokens -= count
        return not calm

    def _score_from(self, sequence: Sequence, start: int, end: int) -> int | None:
        """First position of [start, end) whose following prompt token is not yet scored."""
        if not sequence.score_prompt:
            return None
        first = max(start, sequence.num_scored)
        return first if first < min(end, sequence.prompt_len - 1) else None

    def _admit(self, plan: StepPlan, budget: _Budget) -> None:
        while self.waiting and self._free_rows and budget.chunk(1) > 0:
            sequence = self.waiting[0]
            # What it has, and the token it would sample next.
            num_tokens = len(sequence.token_ids) + (sequence.num_remaining > 0)
            fits = self.tables.fits_now(num_tokens, self.limits.most_tokens_of_a_row)
            # Strictly first come, first served: a smaller request never overtakes.
            if not fits or sequence.num_in_flight:
                return
            self.waiting.pop(0)
            sequence.status = SequenceStatus.RUNNING
            sequence.row = self._free_rows.pop()
            sequence.pages = [[] for _ in self.tables.groups]
            self.running.append(sequence)
            plan.admitted.append(sequence)
            self._plan_prefill(sequence, plan, budget)

    def _make_room(self, sequence: Sequence, num_tokens: int, budget: _Budget) -> bool:
        """Preempts the newest until `sequence` can hold `num_tokens`; False if it had to.

        The oldest is never preempted by another, so it always advances: nothing starves.
        """
        self.tables.release_outside_window(sequence)
        calm = True
        while not self.tables.can_extend(sequence, num_tokens):
            newest = max(self.running, key=lambda other: other.order)
            self._preempt(newest, budget)
            calm = False
            if newest is sequence:
                break
        return calm

    def _preempt(self, sequence: Sequence, budget: _Budget) -> None:
        self.running.remove(sequence)
        budget.rows.pop(sequence.seq_id, None)
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    # Bookkeeping.

    def _advance(self, row: PlannedRow) -> None:
        sequence = row.sequence
        sequence.num_computed += row.num_tokens
        sequence.num_in_flight += row.num_sampled
        if row.score_from is not None:
            sequence.num_scored = sequence.num_computed

    def _finish_if_complete(self, row: PlannedRow, token_ids: list[int]) -> None:
        sequence, stop = row.sequence, row.sequence.stop
        num_output = len(sequence.token_ids) - sequence.prompt_len
        if stop.max_tokens == 0:
            if row.start + row.num_tokens >= sequence.prompt_len:
                self.finish(sequence, "length")
        elif token_ids and token_ids[-1] in stop.stop_ids and num_output > stop.min_tokens:
            sequence.stop_token = token_ids[-1]
            self.finish(sequence, "stop")
        elif num_output >= stop.max_tokens:
            self.finish(sequence, "length")

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda other: other.order)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes the row and the pages back; everything is recomputed when it runs again."""
        self.tables.release(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_computed = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and rows add up."""
        self.tables.check_integrity(self.running)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs))
        assert self.waiting == sorted(self.waiting, key=lambda sequence: sequence.order)
