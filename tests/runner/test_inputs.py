"""What is packed is what was planned, and every plan of the scheduler has room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.runner.buckets import make_ladders
from jaxinfer.runner.inputs import StepBuffer, logit_rows
from jaxinfer.runner.step_layout import decode_layout, ragged_layout
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.ngram import NgramDrafter
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.plan import PageUpdate, PlannedRow, RowResult, StepPlan
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sequence import Sequence, SequenceStatus, StopRule

LOGIT_BLOCK = 8


def check_page_updates(views, plan, table_shape):
    """Entries of planned rows, in order; the rest points past the end of the table."""
    size = int(np.prod(table_shape))
    rows = {row.row for row in plan.rows}
    wanted = [update for update in plan.page_updates if update.row in rows]
    index = [
        int(np.ravel_multi_index((update.group, update.row, update.index), table_shape))
        for update in wanted
    ]
    assert views["page_index"][: len(index)].tolist() == index
    assert np.all(views["page_index"][len(index) :] == size)
    assert views["page_value"][: len(index)].tolist() == [update.page for update in wanted]


def check_decode(packed, layout, plan, dummy_row, table_shape):
    views = layout.views(packed.copy())
    count = len(plan.rows)
    assert views["num_seqs"] == count
    assert views["wants_top"] == any(
        row.sequence.logprobs or row.sequence.prompt_logprobs for row in plan.rows
    )
    assert views["num_steps"] == max(row.num_tokens for row in plan.rows)
    assert views["rows"].tolist()[:count] == [row.row for row in plan.rows]
    assert np.all(views["rows"][count:] == dummy_row)
    assert views["kv_lens"].tolist()[:count] == [row.start + 1 for row in plan.rows]
    assert views["limits"].tolist()[:count] == [row.num_tokens for row in plan.rows]
    assert not np.any(views["kv_lens"][count:])
    assert not np.any(views["limits"][count:])
    check_page_updates(views, plan, table_shape)


def check_ragged(packed, layout, plan, dummy_row, table_shape):
    views = layout.views(packed.copy())
    count = len(plan.rows)
    assert views["num_decodes"] == plan.num_decodes
    assert views["num_seqs"] == count
    assert views["wants_top"] == any(
        row.sequence.logprobs or row.sequence.prompt_logprobs for row in plan.rows
    )
    starts = views["cu_q_lens"]
    assert starts[0] == 0
    assert np.all(starts[count:] == starts[count])
    tokens, logits = [], []
    for index, row in enumerate(plan.rows):
        assert views["rows"][index] == row.row
        q_len = len(row.token_ids) or 1
        assert starts[index + 1] - starts[index] == q_len
        assert views["kv_lens"][index] == row.start + q_len
        for offset, target in logit_rows(row):
            assert 0 <= offset < q_len
            logits.append((int(starts[index]) + offset, target))
        tokens += row.token_ids or [-1]
    assert views["token_ids"].tolist() == tokens + [0] * (len(views["token_ids"]) - len(tokens))
    assert np.all(views["rows"][count:] == dummy_row)
    assert not np.any(views["kv_lens"][count:])
    assert views["num_logits"] == len(logits)
    packed_logits = zip(views["logit_index"].tolist(), views["logit_target"].tolist(), strict=True)
    assert list(packed_logits)[: len(logits)] == logits
    assert len({index for index, _ in logits}) == len(logits)
    check_drafts(views, plan)
    check_page_updates(views, plan, table_shape)


def check_drafts(views, plan):
    """Each draft lies at the logit row before its own, and the rows of one sequence know theirs."""
    drafts, firsts = [], []
    for row in plan.rows:
        count = len(logit_rows(row))
        ids = list(row.token_ids[-row.num_drafts :]) if row.num_drafts else []
        assert not ids or count == len(ids) + 1
        firsts += [len(firsts)] * count if ids else range(len(firsts), len(firsts) + count)
        drafts += ids + [-1] * (count - len(ids))
    assert views["logit_draft"][: len(drafts)].tolist() == drafts
    assert np.all(views["logit_draft"][len(drafts) :] == -1)
    assert views["logit_first"][: len(firsts)].tolist() == firsts


def random_plan(rng, decode_only):
    """A plan for a state of at most 5 rows, 2 groups and pages 0 to 5 of a row."""
    rows = rng.permutation(5)[: rng.integers(1, 6)].tolist()
    num_decodes = len(rows) if decode_only else int(rng.integers(0, len(rows)))
    planned = []
    for index, row in enumerate(rows):
        start, length = int(rng.integers(0, 21)), int(rng.integers(1, 7))
        is_decode = index < num_decodes
        ids = tuple(rng.integers(0, 99, length).tolist())
        prompt = [0] * start + list(ids) + [7] * int(rng.integers(0, 3))
        sequence = Sequence(
            f"s{row}",
            prompt,
            len(prompt),
            StopRule(5),
            logprobs=rng.choice([None, 0, 3], p=[0.6, 0.3, 0.1]),
            prompt_logprobs=rng.choice([None, 0, 3], p=[0.6, 0.3, 0.1]),
        )
        score_from = None
        if not is_decode and rng.random() < 0.5 and start < len(prompt) - 1:
            score_from = int(rng.integers(start, min(start + length, len(prompt) - 1)))
        samples = is_decode or len(prompt) == start + length
        verifies = not is_decode and samples and score_from is None and rng.random() < 0.7
        num_tokens = length if not is_decode or decode_only else 1
        planned.append(
            PlannedRow(
                sequence,
                row,
                start,
                num_tokens,
                () if is_decode else ids,
                num_sampled=num_tokens if is_decode or verifies else int(samples),
                score_from=score_from,
            )
        )
    updates = [
        PageUpdate(int(group), int(row), int(index), int(page))
        for group, row, index, page in zip(
            rng.integers(0, 2, 4),
            rng.choice(rows, 4),
            rng.integers(0, 6, 4),
            rng.integers(1, 99, 4),
            strict=True,
        )
    ]
    return StepPlan(rows=planned, page_updates=updates[: rng.integers(0, 5)])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_decode_round_trip(seed):
    rng = np.random.default_rng(seed)
    layout, table_shape = decode_layout(6, 2, 4, 6), (2, 7, 6)
    buffer = StepBuffer(layout, 6, table_shape)
    for _ in range(5):  # arrays are reused: nothing of the last plan may be left
        plan = random_plan(rng, decode_only=True)
        packed = buffer.fill_decode(plan)
        check_decode(packed, layout, plan, 6, table_shape)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ragged_round_trip(seed):
    rng = np.random.default_rng(seed)
    layout, table_shape = ragged_layout(32, 6, 2, 4, LOGIT_BLOCK), (2, 7, 6)
    buffer = StepBuffer(layout, 6, table_shape)
    for _ in range(5):
        plan = random_plan(rng, decode_only=False)
        packed = buffer.fill_ragged(plan)
        check_ragged(packed, layout, plan, 6, table_shape)


def test_the_last_array_is_left_alone_while_the_next_is_filled():
    layout = decode_layout(2, 1, 4, 1)
    buffer = StepBuffer(layout, 2, (1, 3, 4))
    sequence = Sequence("s", [1], 1, StopRule(5))
    plan = StepPlan(rows=[PlannedRow(sequence, 0, 3, 1, (), num_sampled=1)])
    first = buffer.fill_decode(plan, False)
    kept = first.copy()
    buffer.fill_empty()
    assert np.array_equal(first, kept)


class Packer:
    """Packs every plan of a scheduler into the rung the runner would choose."""

    def __init__(self, limits, num_groups, page_size, max_model_len):
        self.limits = limits
        bulk = limits.max_num_seqs if limits.decode_steps > 1 else 0
        self.ladders = make_ladders(
            "cpu",
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            bulk,
            limits.num_draft_tokens > 0,
        )
        self.table_shape = (num_groups, limits.max_num_seqs + 1, -(-max_model_len // page_size))
        self.buffers = {}
        for rung in self.ladders.decode:
            for steps in {1, limits.decode_steps}:
                layout = decode_layout(rung, num_groups, page_size, steps)
                self.buffers["decode", rung, steps] = self._buffer(layout)
        for rung in self.ladders.tokens:
            layout = ragged_layout(rung, limits.max_num_seqs, num_groups, page_size, LOGIT_BLOCK)
            self.buffers["ragged", rung, 1] = self._buffer(layout)

    def _buffer(self, layout):
        return StepBuffer(layout, self.limits.max_num_seqs, self.table_shape)

    def pack(self, plan):
        dummy_row = self.limits.max_num_seqs
        if plan.is_decode_only:
            steps = self.limits.decode_steps if plan.num_steps > 1 else 1
            buffer = self.buffers["decode", self.ladders.decode_rung(len(plan.rows)), steps]
            packed = buffer.fill_decode(plan)
            check_decode(packed, buffer.layout, plan, dummy_row, self.table_shape)
        else:
            rung = self.ladders.token_rung(plan.num_queries)
            buffer = self.buffers["ragged", rung, 1]
            packed = buffer.fill_ragged(plan)
            check_ragged(packed, buffer.layout, plan, dummy_row, self.table_shape)


def sampled_by(plan, rng):
    """Ids a device might sample: now and then a stop id, after which the row is silent."""
    results = []
    for row in plan.rows:
        ids = []
        for index in range(row.num_sampled):
            ids.append(int(rng.integers(0, 30)))
            if index < row.num_drafts and rng.random() < 0.7:
                ids[-1] = row.token_ids[index + 1]
            is_wrong = index < row.num_drafts and ids[-1] != row.token_ids[index + 1]
            if is_wrong or ids[-1] in row.sequence.stop.stop_ids:
                break
        results.append(RowResult(ids))
    return results


@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=["one group", "a window"])
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 4, 16]),
    max_num_seqs=st.integers(1, 9),
    extra_budget=st.integers(0, 40),
    decode_steps=st.sampled_from([1, 5]),
    depth=st.integers(0, 1),
    spare=st.integers(0, 40),
    num_drafts=st.sampled_from([0, 3, 9]),
)
def test_every_plan_of_the_scheduler_has_room(
    windows, seed, page_size, max_num_seqs, extra_budget, decode_steps, depth, spare, num_drafts
):
    rng = np.random.default_rng(seed)
    longest = 48
    budget = max_num_seqs + extra_budget
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=int(rng.integers(1, budget + 1)),
        decode_steps=decode_steps,
        pipeline_depth=depth,
        num_draft_tokens=num_drafts,
        max_tokens_with_drafts=16,
    )
    num_pages = 2 + -(-longest // page_size) + spare // page_size
    tables = PageTables([GroupSpec(num_pages, window) for window in windows], page_size)
    scheduler = Scheduler(limits, tables)
    packer = Packer(limits, len(windows), page_size, longest)
    sequences = []
    for index in range(int(rng.integers(1, 14))):
        speculates = num_drafts > 0 and rng.random() < 0.7
        prompt = rng.integers(0, 5 if speculates else 99, rng.integers(1, 30)).tolist()
        sequences.append(
            Sequence(
                f"s{index}",
                prompt,
                len(prompt),
                StopRule(int(rng.integers(0, 18)), 0, frozenset({3} if rng.random() < 0.5 else ())),
                priority=int(rng.integers(0, 2)),
                prompt_logprobs=0 if rng.random() < 0.4 else None,
                steps_in_bulk=bool(rng.random() < 0.7),
                drafter=NgramDrafter(num_drafts, prompt) if speculates else None,
            )
        )
    arrivals = sorted(rng.integers(0, 25, len(sequences)).tolist())
    pending = []
    for step in range(4000):
        for when, sequence in zip(arrivals, sequences, strict=True):
            if when == step:
                scheduler.add(sequence)
        plan = scheduler.schedule()
        if plan is not None:
            packer.pack(plan)
            pending.append(plan)
        if pending and (plan is None or len(pending) > depth):
            done = pending.pop(0)
            scheduler.update(done, sampled_by(done, rng))
        if step > 25 and not pending and not scheduler.has_work:
            break
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in sequences)
