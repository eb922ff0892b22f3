"""Continuous batching: each step is one token budget, spent on decodes, then on prompts.

A prompt, a chunk of a prompt and a decode are the same thing with different token counts. Prompts
are computed first come, first served within a priority, whether they were begun already or wait.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from operator import attrgetter

from jaxinfer.scheduler.chunking import FixedChunks, FreeChunks, StepBudget
from jaxinfer.scheduler.drafts import Drafts
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import PageTables
from jaxinfer.scheduler.plan import PlannedRow, RowResult, StepPlan
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.quarantine import Quarantine
from jaxinfer.scheduler.sequence import Sequence, SequenceFinish, SequenceStatus

MAX_PASSED_OVER = 32
"""Sequences in one step that others may overtake because their next page is being computed."""

_order = attrgetter("order")


class Scheduler:
    """Decides each step from the sequences' token counts.

    `schedule` counts a dispatched token as computed. `update` confirms what the step sampled;
    tokens of sequences that ended meanwhile are dropped there.

    Args:
      limits: of a step.
      tables: the pages.
      cache: finds pages of earlier sequences in them; None to compute everything.
    """

    def __init__(
        self, limits: SchedulerLimits, tables: PageTables, cache: PrefixCache | None = None
    ) -> None:
        self.limits = limits
        self.tables = tables
        self.cache = cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.chunks: FreeChunks | FixedChunks
        if limits.chunk_tokens is None:
            self.chunks = FreeChunks(
                tables, limits.max_prefill_chunk_tokens, limits.prefill_pace, self._reach
            )
        else:
            self.chunks = FixedChunks(tables, limits.chunk_tokens, self._reach)
        self.drafts = Drafts(tables, limits.max_tokens_with_drafts)
        self.quarantine = Quarantine()
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    # Arrivals and departures.

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits the pool when it is alone."""
        return self.tables.fits_empty(num_tokens, self._reach)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
          ValueError: it could never be finished within the page pool.
        """
        if not self.fits(sequence.max_num_tokens):
            raise ValueError(
                f"{sequence.seq_id} may reach {sequence.max_num_tokens} tokens, but the KV pool "
                f"holds {self.tables.pools[0].num_total * self.tables.page_size}"
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

    def clear_prefix_cache(self) -> None:
        """Forgets all pages of earlier sequences; what now runs leaves none behind either."""
        if self.cache is not None:
            self.cache.clear()

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.waiting or self.running)

    # One step.

    def schedule(self) -> StepPlan | None:
        """Plans the next step, or returns None when nothing can be computed now."""
        if self.quarantine.advance():
            self._preempt_all()
        if self.drafts.is_waited_for(self.running) and not (self.waiting and self._free_rows):
            return None
        plan = StepPlan(num_steps=self._bulk_steps())
        budget = StepBudget(self.limits.max_num_batched_tokens, self.limits.max_num_batched_tokens)
        if self.chunks.decodes_first:
            others, preempted = self._plan_decodes(plan, budget)
        else:
            others, preempted = list(self.running), False
        if budget.rows:
            self.chunks.limit_prefill(budget)
        prompts = [sequence for sequence in others if not sequence.is_decoding]
        for sequence in sorted(prompts, key=_order):
            if not preempted:
                self._admit(plan, budget, before=sequence)
            if sequence.status is SequenceStatus.RUNNING:
                preempted |= self._plan_prefill(sequence, plan, budget)
        if not preempted:
            self._admit(plan, budget)
            self.drafts.add(plan, budget.rows, budget.tokens)
        if not (budget.rows or self.chunks.decodes_first):
            self._plan_decodes(plan, budget)
        plan.rows = list(budget.rows.values())
        self.chunks.took(plan.rows)
        for row in plan.rows:
            sequence = row.sequence
            sequence.num_computed += row.num_tokens
            sequence.num_in_flight += row.num_sampled
            if row.score_from is not None:
                sequence.num_scored = sequence.num_computed
        return plan if plan.rows else None

    def update(
        self, plan: StepPlan, results: Iterable[RowResult]
    ) -> list[tuple[PlannedRow, RowResult]]:
        """Takes what a step sampled, a result per row; ends the sequences that completes.

        Pages of sequences whose logits were not finite are forgotten. Returns the results that
        count, with their rows: those of sequences that had not ended.
        """
        counting = []
        is_watching, finished = self.quarantine.is_watching, SequenceStatus.FINISHED
        for row, result in zip(plan.rows, results, strict=True):
            sequence = row.sequence
            sequence.num_in_flight -= row.num_sampled
            if is_watching:
                self.quarantine.confirm(row)
            if sequence.status is finished:
                continue
            token_ids = result.token_ids
            sequence.token_ids += token_ids
            if sequence.drafter is not None:
                self.drafts.settle(row, sequence.drafter, token_ids)
            if not result.finite and self.cache is not None:
                self.cache.distrust(sequence)
            self._confirm(row, len(token_ids))
            self._finish_if_complete(row, token_ids)
            counting.append((row, result))
        return counting

    def fail(self, failed: StepPlan, lost: Iterable[StepPlan]) -> Sequence | None:
        """Undoes a step that failed and those dispatched after it; what ran is to run again.

        The cache they left behind is gone, so nothing of it can be reused. Returns the sequence
        that makes steps fail once it is known; the caller ends it.
        """
        for plan in (failed, *lost):
            for row in plan.rows:
                sequence = row.sequence
                sequence.num_in_flight -= row.num_sampled
                sequence.is_verifying = False
                if row.score_from is not None:
                    sequence.num_scored = min(sequence.num_scored, row.score_from)
        culprit = self.quarantine.fail(failed.rows)
        self._preempt_all()
        self.clear_prefix_cache()
        return culprit

    # Planning.

    def _bulk_steps(self) -> int:
        """Decode steps to dispatch at once: more than one only when nothing else could run."""
        steps = self.limits.bulk_steps(len(self.running))
        if steps == 1 or self.waiting:
            return 1
        if all(
            sequence.is_decoding and sequence.steps_in_bulk and not sequence.has_drafts
            for sequence in self.running
        ):
            return steps
        return 1

    def _plan_decodes(self, plan: StepPlan, budget: StepBudget) -> tuple[list[Sequence], bool]:
        """Plans what decodes; returns the rest, and whether anything was preempted."""
        others, preempted = [], False
        most, rows = plan.num_steps, budget.rows
        for sequence in list(self.running):
            if sequence.row < 0:
                continue  # preempted by an older one in this very loop
            steps = sequence.decode_steps(most)
            if not steps:
                others.append(sequence)
                continue
            start = sequence.num_computed
            if not self.tables.holds(sequence, start + steps):  # in one step of a page's
                preempted |= not self._make_room(sequence, start + steps, budget)
                if sequence.row < 0:
                    continue
                plan.page_updates += self.tables.extend(sequence, start + steps)
            # By position, as it is made for every row of every step.
            rows[sequence.seq_id] = PlannedRow(
                sequence, sequence.row, start, steps, (), steps, None, sequence.num_admissions
            )
        budget.tokens -= len(rows)
        return others, preempted

    def _plan_prefill(self, sequence: Sequence, plan: StepPlan, budget: StepBudget) -> bool:
        """Plans the next chunk of a prompt; returns whether anything was preempted for it."""
        count = self.chunks.size(sequence.num_computed, len(sequence.token_ids), budget)
        if count <= 0 or sequence.num_in_flight:
            return False
        start, end = sequence.num_computed, sequence.num_computed + count
        calm = self._make_room(sequence, end, budget)
        if sequence.status is SequenceStatus.RUNNING:
            plan.page_updates += self.tables.extend(sequence, end)
            budget.rows[sequence.seq_id] = PlannedRow(
                sequence,
                sequence.row,
                start,
                count,
                tuple(sequence.token_ids[start:end]),
                num_sampled=int(end == len(sequence.token_ids) and sequence.num_remaining > 0),
                score_from=self._score_from(sequence, start, end),
                admission=sequence.num_admissions,
                embeds=sequence.embeds and end == len(sequence.token_ids),
            )
            self.chunks.spend(start, count, budget)
        return not calm

    def _score_from(self, sequence: Sequence, start: int, end: int) -> int | None:
        """First position of [start, end) whose following prompt token is not yet scored."""
        if not sequence.scores_prompt:
            return None
        first = max(start, sequence.num_scored)
        return first if first < min(end, sequence.prompt_len - 1) else None

    def _admit(self, plan: StepPlan, budget: StepBudget, before: Sequence | None = None) -> None:
        """Begins what waits, as far as there is room; only what comes `before` one that runs."""
        index = passed_over = 0
        while index < len(self.waiting) and self._free_rows and budget.chunk > 0:
            sequence = self.waiting[index]
            if before is not None and sequence.order > before.order:
                return
            if not self.quarantine.allows(sequence):
                index += 1
                continue
            if sequence.num_in_flight or passed_over == MAX_PASSED_OVER:
                return
            num_cached = 0 if self.cache is None else self.cache.find(sequence)
            if num_cached is None:
                # It starves no more than the one that computes the page, which advances or leaves.
                index += 1
                passed_over += 1
                continue
            # Otherwise first come, first served: a smaller request never overtakes.
            start = num_cached * self.tables.page_size
            if self.chunks.size(start, len(sequence.token_ids), budget) <= 0:
                return
            if not self._take_pages(sequence, num_cached):
                return
            self.waiting.pop(index)
            sequence.status = SequenceStatus.RUNNING
            sequence.row = self._free_rows.pop()
            sequence.num_admissions += 1
            if self.cache is not None:
                self.cache.admit(sequence)
            self.running.append(sequence)
            plan.admitted.append(sequence)
            self._plan_prefill(sequence, plan, budget)

    def _take_pages(self, sequence: Sequence, num_cached: int) -> bool:
        """Gives a waiting sequence its first pages from the cache, if the rest fits too."""
        sequence.pages = [[] for _ in self.tables.groups]
        if self.cache is not None:
            self.cache.take(sequence, num_cached)
        if not self.chunks.has_room(sequence, self.running):
            self.tables.release(sequence)
            return False
        sequence.num_computed = sequence.num_confirmed = num_cached * self.tables.page_size
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int, budget: StepBudget) -> bool:
        """Preempts the newest until `sequence` can hold `num_tokens`; False if it had to.

        The oldest is never preempted by another, so it always advances: nothing starves.
        """
        # Pages that are to be published are kept until what is in them is certain.
        position = sequence.num_computed if self.cache is None else sequence.num_confirmed
        self.tables.release_outside_window(sequence, position)
        calm = True
        while not self.tables.can_extend(sequence, num_tokens):
            newest = max(self.running, key=_order)
            self._preempt(newest, budget)
            calm = False
            if newest is sequence:
                break
        return calm

    def _preempt(self, sequence: Sequence, budget: StepBudget) -> None:
        self.running.remove(sequence)
        budget.rows.pop(sequence.seq_id, None)
        self._vacate(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _preempt_all(self) -> None:
        nothing_planned = StepBudget(0, 0)
        for sequence in list(self.running):
            self._preempt(sequence, nothing_planned)

    # Bookkeeping.

    @property
    def _reach(self) -> int:
        """Tokens by which a sequence computes ahead of where its window lets go of pages."""
        unconfirmed = 0 if self.cache is None else self.limits.pipeline_depth
        return self.limits.most_tokens_of_a_row * (1 + unconfirmed)

    def _confirm(self, row: PlannedRow, num_sampled: int) -> None:
        """Takes note of how far a sequence was computed, and publishes pages that are full."""
        sequence = row.sequence
        if row.admission != sequence.num_admissions or sequence.row < 0:
            return  # preempted since: it has other pages, or none
        confirmed = row.start + row.num_tokens
        # The last token that was sampled is not computed yet.
        known = len(sequence.token_ids) - (num_sampled > 0)
        if known < confirmed:
            confirmed = known
        before, sequence.num_confirmed = sequence.num_confirmed, confirmed
        page_size = self.tables.page_size
        if self.cache is not None and confirmed // page_size > before // page_size:
            self.cache.publish(sequence)

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
        bisect.insort(self.waiting, sequence, key=_order)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes the row and the pages back; everything is recomputed when it runs again."""
        if self.cache is not None:
            self.cache.leave(sequence)
        self.tables.release(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.num_computed = sequence.num_confirmed = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages and rows add up."""
        self.tables.check_integrity(self.running)
        if self.cache is not None:
            self.cache.check_integrity(self.running)
        rows = [sequence.row for sequence in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.max_num_seqs))
        assert self.waiting == sorted(self.waiting, key=_order)
