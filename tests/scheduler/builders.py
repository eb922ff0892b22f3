"""Builders with every knob a keyword, and a pretend device that samples by a fixed rule."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.plan import RowResult
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, SequenceStatus, StopRule


def make_scheduler(
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
    prefix_cache=False,
    chunk_tokens=None,
    prefill_pace=None,
):
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk_tokens=max_prefill_chunk_tokens or max_num_batched_tokens,
        decode_steps=decode_steps,
        bulk_rows=bulk_rows,
        max_decode_steps_before_prefill=max_decode_steps_before_prefill,
        pipeline_depth=pipeline_depth,
        chunk_tokens=chunk_tokens,
        prefill_pace=prefill_pace,
    )
    tables = PageTables([GroupSpec(num_pages, window) for window in windows], page_size)
    cache = PrefixCache(tables, b"salt", chunk_tokens) if prefix_cache else None
    return Scheduler(limits, tables, cache)


def make_sequence(seq_id="s", *, prompt_len=5, prompt=None, max_tokens=4, stop_ids=(), **options):
    prompt = [1000 + i for i in range(prompt_len)] if prompt is None else list(prompt)
    stop = StopRule(max_tokens, 0, frozenset(stop_ids))
    return Sequence(seq_id, prompt, len(prompt), stop, **options)


def count_prompt_tokens(plan):
    """Prompt (or recomputed) tokens in a step."""
    return sum(row.num_tokens for row in plan.rows if not (row.is_decode or row.num_drafts))


class PretendDevice:
    """Samples token id `position % 13` at each position, and checks what a real device relies on.

    It keeps the cache as a device would: every key a query can see must still be there, and must
    be one of the sequence's own tokens after all those before it. Without a prefix cache it must
    have been written by the sequence itself.

    A sequence in `spoilt` computes what is not a number as soon as it samples.
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.pending = []
        self.table = {}
        self.memory = {}  # (group, page, offset) -> whose key of which tokens
        self.cached = {}  # row -> positions computed
        self.alive = {}
        self.tokens = {}  # row -> ids it has
        self.digests = {}  # row -> per position, a hash of its id and all before it
        self.spoilt = set()
        self.num_computed = 0

    def step(self):
        """Runs one engine step; returns the results that count, with their rows."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.pending.append((plan, self._run(plan)))
        if self.pending and (
            plan is None or len(self.pending) > self.scheduler.limits.pipeline_depth
        ):
            counting = self.scheduler.update(*self.pending.pop(0))
            self.scheduler.check_integrity()
            for row, result in counting:
                if not result.finite:
                    self.scheduler.finish(row.sequence, "error")
            return counting
        return []

    @property
    def has_work(self):
        return self.scheduler.has_work or bool(self.pending)

    def _slot(self, group, row, position):
        index, offset = divmod(position, self.scheduler.tables.page_size)
        return group, self.table[group, row, index], offset

    def _admit(self, sequence):
        row = sequence.row
        self.table = {key: page for key, page in self.table.items() if key[1] != row}
        for group, pages in enumerate(sequence.pages):
            self.table |= {(group, row, index): page for index, page in enumerate(pages)}
        self.cached[row] = None
        self.alive[row] = True
        self.tokens[row] = []
        self.digests[row] = []
        for token in sequence.token_ids:
            self._append(row, token)

    def _append(self, row, token):
        before = self.digests[row][-1] if self.digests[row] else 0
        self.tokens[row].append(token)
        self.digests[row].append(hash((before, token)))

    def _run(self, plan):
        limits = self.scheduler.limits
        assert len(plan.rows) <= limits.max_num_seqs
        num_prompt_tokens = count_prompt_tokens(plan)
        assert plan.num_decodes + num_prompt_tokens <= limits.max_num_batched_tokens
        if plan.num_decodes:
            assert num_prompt_tokens <= limits.max_prefill_chunk_tokens
        decodes = [row.is_decode for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decodes come first"
        for sequence in plan.admitted:
            self._admit(sequence)
        for update in plan.page_updates:
            assert update.page != 0
            self.table[update.group, update.row, update.index] = update.page
        return [self._run_row(row) for row in plan.rows]

    def _run_row(self, row):
        if not self.alive[row.row]:
            return RowResult([])
        if self.cached[row.row] is None:  # its first step
            self._check_start(row)
        assert row.start == self.cached[row.row], "positions are computed in order, once"
        end = row.start + row.num_tokens
        if not row.is_decode:
            assert list(row.token_ids) == self.tokens[row.row][row.start : end]
        self.num_computed += row.num_tokens
        self.cached[row.row] = end
        ids = []
        for position in range(row.start, end):
            self._compute(row, position)
            if row.num_sampled and (row.is_decode or position == end - 1):
                ids.append((position + 1) % 13)
                self._append(row.row, ids[-1])
                if ids[-1] in row.sequence.stop.stop_ids:
                    self.alive[row.row] = False
                    break
        return RowResult([], finite=False) if self._is_spoilt(row) else RowResult(ids)

    def _is_spoilt(self, row):
        return row.num_sampled > 0 and row.sequence.seq_id in self.spoilt

    def _check_start(self, row):
        if self.scheduler.cache is None or row.sequence.scores_prompt:
            assert row.start == 0, "everything is computed"
        assert row.start % self.scheduler.tables.page_size == 0
        assert row.start < len(row.sequence.token_ids), "a token is left to compute"
        self.cached[row.row] = row.start

    def _compute(self, row, position):
        """Writes the key of one position, and reads those that it can see."""
        owner = row.sequence.seq_id if self.scheduler.cache is None else None
        digests = self.digests[row.row]
        writes = (owner, "not a number" if self._is_spoilt(row) else digests[position])
        for group, spec in enumerate(self.scheduler.tables.groups):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            self.memory[self._slot(group, row.row, position)] = writes
            if self._is_spoilt(row):
                continue
            for seen in range(first, position + 1):
                held = self.memory[self._slot(group, row.row, seen)]
                assert held == (owner, digests[seen]), "a visible key is not the sequence's own"


class Schedules(RuleBasedStateMachine):
    """What may happen to `scheduler` on `device`; subclasses make both, and add to `sequences`.

    The device may be pretended, or a client of a real engine.
    """

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.device.step()

    @precondition(lambda self: getattr(self, "sequences", None))
    @rule(data=st.data(), reason=st.sampled_from(["abort", "error"]))
    def end_early(self, data, reason):
        self.end(data.draw(st.sampled_from(self.sequences)), reason)

    def end(self, sequence, reason):
        """Ends one of `sequences` now, if it has not ended."""
        if sequence.status is not SequenceStatus.FINISHED:
            self.scheduler.finish(sequence, reason)

    @precondition(lambda self: getattr(self, "sequences", None))
    @rule(is_lucky=st.integers(0, 4))
    def clear(self, is_lucky):
        if is_lucky == 0:
            self.scheduler.clear_prefix_cache()

    @invariant()
    def everything_is_accounted_for(self):
        self.scheduler.check_integrity()
