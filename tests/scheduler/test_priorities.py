"""First come, first served within a priority, while requests arrive and pages run out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.builders import PretendDevice, make_scheduler, make_sequence

from jaxinfer.scheduler.pace import PrefillPace
from jaxinfer.scheduler.sequence import SequenceStatus


def alive(sequences):
    return [one for one in sequences if one.status is not SequenceStatus.FINISHED]


def steps_at_most(scheduler, sequence):
    """Steps within which a sequence ends that is the first of all, whoever arrives behind it.

    Each step computes a token of those that run, or is the one that waits for results. Whoever of
    them is preempted runs again only behind the sequence.
    """
    running = {*scheduler.running, sequence}
    tokens = sum(one.max_num_tokens for one in running)
    return (1 + scheduler.limits.pipeline_depth) * (tokens + len(running)) + 2


class Watched:
    """A device of which each step is checked against the rules of priorities."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.device = PretendDevice(scheduler)
        self.sequences = []
        self.first = None  # the first of all that are alive, and the steps it may still take
        self.steps_left = 0
        schedule = scheduler.schedule
        scheduler.schedule = lambda: self._check(schedule)

    def add(self, sequence):
        if self.scheduler.fits(sequence.max_num_tokens):
            self.scheduler.add(sequence)
            self.sequences.append(sequence)

    def step(self):
        before = min(alive(self.sequences), key=lambda one: one.order, default=None)
        if before is not self.first:
            self.first = before
            self.steps_left = before and steps_at_most(self.scheduler, before)
        elif before is not None:
            self.steps_left -= 1
            assert self.steps_left > 0, f"{before.seq_id}, the first of all, is held up"
        self.device.step()

    def _check(self, schedule):
        running = list(self.scheduler.running)
        plan = schedule()
        preempted = [one for one in running if one.status is SequenceStatus.WAITING]
        orders = {one.order for one in preempted}
        last = max((one.order for one in self.scheduler.running), default=(-1, -1))
        assert all(order > last for order in orders), "an earlier one made room for a later one"
        if running:
            assert min(running, key=lambda one: one.order) not in preempted
        if plan is not None and plan.admitted:
            admitted = [one.order for one in plan.admitted]
            assert all(order > max(admitted) for order in orders), "it made room for a later one"
            self._check_admitted(admitted)
        return plan

    def _check_admitted(self, admitted):
        assert admitted == sorted(admitted)
        if self.scheduler.cache is None:
            waiting = [one.order for one in self.scheduler.waiting]
            assert not waiting or admitted[-1] < min(waiting), "a later one overtook"


def draw_scheduler(draw, **more):
    page_size = draw(st.sampled_from([1, 3, 4]))
    rows = draw(st.integers(1, 5))
    budget = draw(st.integers(rows, 16))
    return make_scheduler(
        page_size=page_size,
        num_pages=2 + draw(st.integers(24, 70)) // page_size,
        windows=draw(st.sampled_from([(None,), (None, 6), (5,)])),
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=draw(st.integers(1, budget)),
        prefill_pace=draw(st.sampled_from([None, PrefillPace(2, 1, 20, (None, 6))])),
        decode_steps=draw(st.integers(1, 4)),
        pipeline_depth=draw(st.integers(0, 1)),
        **more,
    )


def draw_sequence(draw, name, priorities, **options):
    return make_sequence(
        name,
        prompt_len=draw(st.integers(1, 16)),
        max_tokens=draw(st.integers(0, 12)),
        stop_ids=draw(st.sampled_from([(), (3,)])),
        priority=draw(st.sampled_from(priorities)),
        **options,
    )


@pytest.mark.parametrize("prefix_cache", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_first_of_all_always_ends_soon(prefix_cache, data):
    watched = Watched(draw_scheduler(data.draw, prefix_cache=prefix_cache))
    for index in range(data.draw(st.integers(1, 16), "arrivals")):
        # Prompts of one salt begin alike.
        salt = data.draw(st.sampled_from([b"", bytes([index])]))
        watched.add(draw_sequence(data.draw, f"s{index}", [-1, 0, 0, 5], cache_salt=salt))
        for _ in range(data.draw(st.integers(0, 6), "steps")):
            watched.step()
    while watched.device.has_work:
        watched.step()
    for sequence in watched.sequences:
        ids = sequence.token_ids[sequence.prompt_len :]
        positions = range(sequence.prompt_len, len(sequence.token_ids))
        assert ids == [position % 13 for position in positions]
    assert all(pool.num_used == 0 for pool in watched.scheduler.tables.pools)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_low_priority_waits_while_higher_ones_come_and_no_longer(data):
    """Higher ones come at every step, more than these schedulers can do, and then no more."""
    watched = Watched(draw_scheduler(data.draw))
    low = make_sequence("low", prompt_len=6, max_tokens=3, priority=9)
    watched.add(make_sequence("high", prompt_len=4, max_tokens=4, priority=1))
    watched.add(low)
    for index in range(data.draw(st.integers(0, 40), "higher")):
        watched.add(draw_sequence(data.draw, f"s{index}", [0, 1, 1]))
        watched.step()
    limit = steps_at_most(watched.scheduler, low) + 2 * sum(
        one.max_num_tokens + 2 for one in watched.sequences
    )
    for _ in range(limit):
        if low.status is SequenceStatus.FINISHED:
            break
        watched.step()
    assert low.token_ids[6:] == [6, 7, 8]


def run(device):
    while device.has_work:
        device.step()


def test_who_runs_lets_the_first_prompt_compute_first():
    """A prompt that was begun before does not hold up one that comes before it."""
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=3, num_pages=64)
    device = PretendDevice(scheduler)
    low = make_sequence("low", prompt_len=60, max_tokens=2, priority=1)
    high = make_sequence("high", prompt_len=20, max_tokens=2, priority=0)
    tiny = make_sequence("tiny", prompt_len=1, max_tokens=60, priority=1)
    for sequence in (tiny, low):
        scheduler.add(sequence)
    device.step()
    scheduler.add(high)
    while high.status is not SequenceStatus.FINISHED:
        device.step()
    assert len(low.token_ids) == 60, "it has not got to its end"
    run(device)


def test_the_last_of_the_lowest_priority_makes_room():
    scheduler = make_scheduler(num_pages=13, page_size=4, max_num_seqs=4)
    device = PretendDevice(scheduler)
    names = {"low": 2, "high": 0, "middle": 1, "low too": 2}
    sequences = {
        name: make_sequence(name, prompt_len=8, max_tokens=16, priority=priority)
        for name, priority in names.items()
    }
    for sequence in sequences.values():
        scheduler.add(sequence)
    preempted = []
    while device.has_work:
        before = {name: one.num_preemptions for name, one in sequences.items()}
        device.step()
        preempted += [n for n, one in sequences.items() if one.num_preemptions > before[n]]
    assert preempted[:2] == ["low too", "low"]
    assert "high" not in preempted


def test_a_higher_priority_is_admitted_before_those_that_wait():
    scheduler = make_scheduler(max_num_seqs=1)
    device = PretendDevice(scheduler)
    ended = []
    sequences = [make_sequence(f"s{i}", max_tokens=2, priority=p) for i, p in enumerate((3, 3, 0))]
    scheduler.add(sequences[0])
    device.step()
    for sequence in sequences[1:]:
        scheduler.add(sequence)
    while device.has_work:
        ended += [
            row.sequence.seq_id
            for row, _ in device.step()
            if row.sequence.status is SequenceStatus.FINISHED
        ]
    assert ended == ["s0", "s2", "s1"]
