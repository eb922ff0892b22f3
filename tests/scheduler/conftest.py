"""Builders with every knob a keyword, and a pretend device that samples by a fixed rule."""

import pytest

from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.scheduler import Scheduler, SchedulerLimits
from jaxinfer.scheduler.sequence import Sequence, StopRule


@pytest.fixture(scope="session")
def make_scheduler():
    def make(
        *,
        num_pages=64,
        page_size=4,
        windows=(None,),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_prefill_chunk_tokens=None,
        decode_steps=1,
        bulk_rows=None,
        max_decode_steps_before_prefill=8,
        pipeline_depth=0,
    ):
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_prefill_chunk_tokens=max_prefill_chunk_tokens or max_num_batched_tokens,
            decode_steps=decode_steps,
            bulk_rows=bulk_rows,
            max_decode_steps_before_prefill=max_decode_steps_before_prefill,
            pipeline_depth=pipeline_depth,
        )
        groups = [GroupSpec(num_pages, window) for window in windows]
        return Scheduler(limits, PageTables(groups, page_size))

    return make


@pytest.fixture(scope="session")
def make_sequence():
    def make(seq_id="s", *, prompt_len=5, max_tokens=4, stop_ids=(), **options):
        prompt = [1000 + i for i in range(prompt_len)]
        return Sequence(
            seq_id, prompt, prompt_len, StopRule(max_tokens, 0, frozenset(stop_ids)), **options
        )

    return make


class PretendDevice:
    """Samples token id `position % 13` at each position, and checks what a real device relies on.

    It keeps the cache as a device would: every key a query can see must still be there.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.pending = []
        self.table = {}
        self.memory = {}  # (group, page, offset) -> whose key of which position
        self.cached = {}  # row -> positions computed
        self.alive = {}

    def step(self):
        """Runs one engine step; returns the sequence updates it caused."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.pending.append((plan, self._run(plan)))
        if self.pending and (
            plan is None or len(self.pending) > self.scheduler.limits.pipeline_depth
        ):
            updates = self.scheduler.update(*self.pending.pop(0))
            self.scheduler.check_integrity()
            return updates
        return []

    @property
    def has_work(self):
        return self.scheduler.has_work or bool(self.pending)

    def _slot(self, group, row, position):
        index, offset = divmod(position, self.scheduler.tables.page_size)
        return group, self.table[group, row, index], offset

    def _run(self, plan):
        limits = self.scheduler.limits
        assert len(plan.rows) <= limits.max_num_seqs
        tokens = plan.num_decodes + plan.num_prompt_tokens
        assert tokens <= limits.max_num_batched_tokens
        if plan.num_decodes:
            assert plan.num_prompt_tokens <= limits.max_prefill_chunk_tokens
        decodes = [row.is_decode for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        for sequence in plan.admitted:
            self.cached[sequence.row] = 0
            self.alive[sequence.row] = True
        for update in plan.page_updates:
            assert update.page != 0
            self.table[update.group, update.row, update.index] = update.page
        sampled = {}
        for row in plan.rows:
            if not self.alive[row.row]:
                sampled[row.sequence.seq_id] = []
                continue
            assert row.start == self.cached[row.row], "positions are computed in order, once"
            for position in range(row.start, row.start + row.num_tokens):
                for group, spec in enumerate(self.scheduler.tables.groups):
                    first = 0 if spec.window is None else max(0, position - spec.window + 1)
                    owner = row.sequence.seq_id
                    self.memory[self._slot(group, row.row, position)] = (owner, position)
                    for seen in range(first, position + 1):
                        held = self.memory[self._slot(group, row.row, seen)]
                        assert held == (owner, seen), "a visible key was overwritten"
            ids, steps = [], row.num_tokens if row.is_decode else 1
            self.cached[row.row] = row.start + row.num_tokens
            if row.samples:
                for step in range(steps):
                    position = row.start + (step + 1 if row.is_decode else row.num_tokens)
                    ids.append(position % 13)
                    if ids[-1] in row.sequence.stop.stop_ids:
                        self.alive[row.row] = False
                        break
            sampled[row.sequence.seq_id] = ids
        return sampled


@pytest.fixture(scope="session")
def pretend_device():
    return PretendDevice
