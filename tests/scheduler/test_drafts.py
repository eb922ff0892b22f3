"""Steps with drafts: every token comes out as without, and what wrong drafts took comes back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.builders import PretendDevice, make_scheduler, make_sequence

from jaxinfer.scheduler.drafts import Drafts
from jaxinfer.scheduler.ngram import NgramDrafter
from jaxinfer.scheduler.plan import RowResult
from jaxinfer.scheduler.sequence import SequenceStatus


class ForcedDrafter:
    """Proposes `length(rng)` tokens of which the first `num_right(rng)` are right."""

    def __init__(self, prompt_len, length, num_right, seed=0):
        self.rng = random.Random(seed)
        self.length, self.num_right = length, num_right
        self.num_tokens = prompt_len
        self.learned = []
        self._plan()

    def _plan(self):
        count, right = self.length(self.rng), self.num_right(self.rng)
        positions = range(self.num_tokens, self.num_tokens + count)
        self.next = tuple(p % 13 if i < right else 99 for i, p in enumerate(positions))

    def extend(self, token_ids):
        self.num_tokens += len(token_ids)
        self._plan()

    def learn(self, num_proposed, num_accepted):
        self.learned.append((num_proposed, num_accepted))

    @property
    def has_drafts(self):
        return bool(self.next)

    def propose(self, most):
        return self.next[:most]


class VerifyingDevice(PretendDevice):
    """A pretend device that also verifies drafts."""

    def _run(self, plan):
        if any(row.num_drafts for row in plan.rows):
            assert plan.num_steps == 1
            assert plan.num_queries <= self.scheduler.drafts._max_tokens
        assert plan.num_queries <= self.scheduler.limits.max_num_batched_tokens
        return super()._run(plan)

    def _run_row(self, row):
        if not row.num_drafts:
            return super()._run_row(row)
        assert self.alive[row.row]
        assert row.start == self.cached[row.row], "positions are computed in order, once"
        assert self.tokens[row.row][row.start :] == [row.token_ids[0]], "nothing is in flight"
        ids, counts = [], True
        for index, position in enumerate(range(row.start, row.start + row.num_tokens)):
            if not counts:
                for group in range(len(self.scheduler.tables.groups)):
                    self.memory[self._slot(group, row.row, position)] = "of a wrong draft"
                continue
            self._compute(row, position)
            ids.append((position + 1) % 13)
            self._append(row.row, ids[-1])
            if ids[-1] in row.sequence.stop.stop_ids:
                self.alive[row.row] = counts = False
            elif index < row.num_drafts:
                counts = row.token_ids[index + 1] == ids[-1]
        self.cached[row.row] = row.start + len(ids)
        return RowResult(ids)


def drafting(max_tokens=16, **options):
    """A scheduler whose steps may have drafts."""
    scheduler = make_scheduler(**options)
    scheduler.drafts = Drafts(scheduler.tables, max_tokens)
    return scheduler


def forced(sequence, length, num_right, seed=0):
    """The sequence, with a drafter that proposes as it is told."""
    as_function = [
        value if callable(value) else lambda rng, v=value: v for value in (length, num_right)
    ]
    sequence.drafter = ForcedDrafter(sequence.prompt_len, *as_function, seed)
    return sequence


def expected_ids(sequence):
    """What the pretend device samples, until a stop id or the limit."""
    ids = []
    for position in range(sequence.prompt_len, sequence.prompt_len + sequence.stop.max_tokens):
        ids.append(position % 13)
        if ids[-1] in sequence.stop.stop_ids:
            break
    return ids


def run_all(device, max_steps=5000):
    """Steps until nothing is left; returns how many steps that took."""
    for step in range(max_steps):
        if not device.has_work:
            return step
        device.step()
    raise AssertionError("the load was never finished: something starved")


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["", "prefix cache"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_loads_with_random_drafts_finish_whole(prefix_cache, data):
    draw = data.draw
    page_size = draw(st.sampled_from([1, 3, 4, 16]), "page_size")
    max_num_seqs = draw(st.integers(1, 6), "max_num_seqs")
    budget = draw(st.integers(max_num_seqs, 24), "budget")
    scheduler = drafting(
        draw(st.integers(0, 20), "max_tokens"),
        prefix_cache=prefix_cache,
        page_size=page_size,
        windows=draw(st.sampled_from([(None,), (None, 6), (5,)]), "windows"),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=draw(st.integers(1, budget), "chunk"),
        decode_steps=draw(st.integers(1, 4), "decode_steps"),
        pipeline_depth=draw(st.integers(0, 1), "depth"),
        num_pages=draw(st.integers(2, 2 + 100 // page_size), "num_pages"),
    )
    device = VerifyingDevice(scheduler)
    sequences, doomed = [], {}
    for index in range(draw(st.integers(1, 8), "sequences")):
        sequence = make_sequence(
            f"s{index}",
            prompt_len=draw(st.integers(1, 22)),
            max_tokens=draw(st.integers(0, 18)),
            stop_ids=draw(st.sampled_from([(), (3,), (1, 7)])),
            priority=draw(st.integers(0, 1)),
        )
        if draw(st.booleans()):
            length, right = draw(st.integers(0, 6)), draw(st.integers(0, 6))
            forced(
                sequence,
                lambda rng, most=length: rng.randint(0, most),
                lambda rng, most=right: rng.randint(0, most),
                index,
            )
        if scheduler.fits(sequence.prompt_len + sequence.stop.max_tokens):
            sequences.append((draw(st.integers(0, 20)), sequence))
            if draw(st.integers(0, 5)) == 0:
                doomed[sequence] = draw(st.integers(0, 40))
    for step in range(5000):
        for when, sequence in sequences:
            if when == step:
                scheduler.add(sequence)
        for sequence, when in doomed.items():
            if when == step and sequence.status is SequenceStatus.RUNNING:
                scheduler.finish(sequence, "abort")
        if step > 40 and not device.has_work:
            break
        device.step()
    for _, sequence in sequences:
        assert sequence.status is SequenceStatus.FINISHED
        ids = sequence.token_ids[sequence.prompt_len :]
        expected = expected_ids(sequence)
        assert ids == (expected[: len(ids)] if sequence.finish_reason == "abort" else expected)
        assert sequence.num_in_flight == 0
    for pool in scheduler.tables.pools:
        assert pool.num_free == pool.num_total
    assert 0 <= scheduler.drafts.num_accepted <= scheduler.drafts.num_tokens


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("length", "right", "steps", "counts"),
    [
        # One token comes of the prompt; then 5 at a time, 1, or 3.
        (4, 4, 4, (3, 12, 12)),
        (4, 0, 16, (14, 50, 0)),
        (4, 2, 6, (5, 18, 10)),
    ],
    ids=["right", "wrong", "half right"],
)
def test_steps_and_counts(depth, length, right, steps, counts):
    scheduler = drafting(pipeline_depth=depth)
    sequence = forced(make_sequence(max_tokens=16), length, right)
    device, plans = VerifyingDevice(scheduler), []
    run_step = device._run
    device._run = lambda plan: plans.append(plan) or run_step(plan)
    scheduler.add(sequence)
    run_all(device)
    assert sequence.token_ids[5:] == expected_ids(sequence)
    assert len(plans) == steps
    drafts = scheduler.drafts
    assert (drafts.num_drafts, drafts.num_tokens, drafts.num_accepted) == counts
    assert sum(taken for _, taken in sequence.drafter.learned) == counts[2]


def test_a_stop_id_inside_right_drafts_ends_there():
    scheduler = drafting()
    sequence = forced(make_sequence(max_tokens=16, stop_ids=(8,)), 6, 6)
    scheduler.add(sequence)
    run_all(VerifyingDevice(scheduler))
    assert sequence.token_ids[5:] == [5, 6, 7, 8]
    assert (sequence.finish_reason, sequence.stop_token) == ("stop", 8)


def test_drafts_do_not_pass_max_tokens():
    scheduler = drafting()
    sequence = forced(make_sequence(max_tokens=4), 9, 9)
    scheduler.add(sequence)
    run_all(VerifyingDevice(scheduler))
    assert sequence.token_ids[5:] == [5, 6, 7, 8]
    assert sequence.finish_reason == "length"
    assert scheduler.drafts.num_tokens == 2, "the last token needs no guess"


def test_pages_of_wrong_drafts_come_back():
    scheduler = drafting(page_size=1)
    sequence = forced(make_sequence(max_tokens=9), 5, 1)
    scheduler.add(sequence)
    device = VerifyingDevice(scheduler)
    device.step()
    device.step()
    assert sequence.token_ids[5:] == [5, 6, 7]
    assert sequence.num_computed == len(sequence.pages[0]) == 7


def test_drafts_take_no_page_that_is_not_free():
    """Two rows fill the pool to the last page: drafts give way and nobody is preempted."""
    scheduler = drafting(num_pages=1 + 2 * 12, page_size=1, max_num_seqs=2)
    for name in "ab":
        scheduler.add(forced(make_sequence(name, max_tokens=8), 6, 0))
    run_all(VerifyingDevice(scheduler))
    assert scheduler.drafts.num_tokens > 0
    assert scheduler.num_preemptions == 0


def test_rows_share_the_tokens_of_a_step():
    scheduler = drafting(max_tokens=10)
    for name in "abc":
        scheduler.add(forced(make_sequence(name, max_tokens=16), 6, 6))
    device = VerifyingDevice(scheduler)
    device.step()
    plan = scheduler.schedule()
    assert [row.num_drafts for row in plan.rows] == [2, 2, 3]


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_without_drafts_go_on_in_the_same_steps(depth):
    scheduler = drafting(pipeline_depth=depth)
    plain, guessed = make_sequence("plain", max_tokens=16), make_sequence("guessed", max_tokens=16)
    for sequence in (plain, forced(guessed, 1, 1)):
        scheduler.add(sequence)
    device = VerifyingDevice(scheduler)
    run_all(device)
    for sequence in (plain, guessed):
        assert sequence.token_ids[5:] == expected_ids(sequence)
    assert scheduler.drafts.num_accepted == 7


def test_nothing_waits_where_no_drafts_can_be_verified():
    """A full step, and one that goes on with a prompt: the pipeline stays filled."""
    scheduler = drafting(max_tokens=2, pipeline_depth=1)
    for name in "ab":
        scheduler.add(forced(make_sequence(name, max_tokens=16), 4, 4))
    device = VerifyingDevice(scheduler)
    for _ in range(5):
        device.step()
        assert len(device.pending) == 1
    assert scheduler.drafts.num_tokens == 0


def test_several_steps_at_once_only_without_drafts():
    scheduler = drafting(decode_steps=4)
    sequence = make_sequence(max_tokens=30)
    forced(sequence, lambda rng: 3 if sequence.num_output_tokens > 12 else 0, 3)
    scheduler.add(sequence)
    device, sizes = VerifyingDevice(scheduler), []
    while device.has_work:
        before = len(sequence.token_ids)
        device.step()
        sizes.append((len(sequence.token_ids) - before, scheduler.drafts.num_drafts))
    assert sizes[:5] == [(1, 0), (4, 0), (4, 0), (4, 0), (4, 1)]


def test_the_real_drafter_saves_steps_on_a_repetition():
    def steps(drafter):
        scheduler = drafting(pipeline_depth=1)
        sequence = make_sequence(prompt=[p % 13 for p in range(30)], max_tokens=60)
        sequence.drafter = drafter(sequence)
        scheduler.add(sequence)
        count = run_all(VerifyingDevice(scheduler))
        assert sequence.token_ids[30:] == expected_ids(sequence)
        return count

    drafted = steps(lambda sequence: NgramDrafter(7, sequence.token_ids))
    assert drafted < 0.4 * steps(lambda sequence: None)
