"""Fixed chunks: how a token is computed depends on its own sequence alone, and all still ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from scheduler.builders import PretendDevice, Schedules, make_scheduler, make_sequence
from scheduler.test_prefix_cache import A, B, run

from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.plan import RowResult
from jaxinfer.scheduler.sequence import SequenceStatus


def extent(position, prompt_len, chunk):
    """The tokens that must be computed together with one: its chunk, or a decode's only itself."""
    if position >= prompt_len:
        return position, position + 1
    start = position // chunk * chunk
    return start, min(start + chunk, prompt_len)


class StrictDevice(PretendDevice):
    """Holds each step to the rules, and each visible key to the tokens it was computed with."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.chunk = scheduler.limits.chunk_tokens
        self.extents = {}  # slot -> what it was computed with
        self.was_prompt = False
        self.can_decode = set()

    def step(self):
        running = self.scheduler.running
        self.can_decode = {one.seq_id for one in running if one.decode_steps(1)}
        counting = super().step()
        assert self.scheduler.num_preemptions == 0
        return counting

    def _run(self, plan):
        assert plan.num_steps == 1
        assert plan.num_decodes in (0, len(plan.rows)), "a decode beside a prompt"
        if plan.is_decode_only:
            assert {row.sequence.seq_id for row in plan.rows} == self.can_decode
        else:
            assert not (self.was_prompt and self.can_decode), "a decode waits for two steps"
        self.was_prompt = not plan.is_decode_only
        return super()._run(plan)

    def _compute(self, row, position):
        sequence = row.sequence
        mine = (row.start, row.start + row.num_tokens)
        assert mine == extent(position, sequence.prompt_len, self.chunk)
        groups = self.scheduler.tables.groups
        for group in range(len(groups)):
            self.extents[self._slot(group, row.row, position)] = mine
        super()._compute(row, position)
        for group, spec in enumerate(groups):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            for seen in range(first, position + 1):
                found = self.extents[self._slot(group, row.row, seen)]
                assert found == extent(seen, sequence.prompt_len, self.chunk)


def fixed_scheduler(*, page_size=4, chunk_pages=2, **options):
    return make_scheduler(page_size=page_size, chunk_tokens=chunk_pages * page_size, **options)


class Engine(Schedules):
    """Arrivals that share prefixes, aborts and clearing, in pools that hold few of them."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        chunk_pages=st.integers(1, 4),
        windows=st.sampled_from([(None,), (None, 6), (5,), (3, None), (None, 13)]),
        rows=st.integers(1, 5),
        spare_budget=st.integers(0, 20),
        depth=st.integers(0, 1),
        tokens=st.integers(48, 150),
        cached=st.sampled_from([True, True, False]),
    )
    def start(self, page_size, chunk_pages, windows, rows, spare_budget, depth, tokens, cached):
        self.scheduler = fixed_scheduler(
            page_size=page_size,
            chunk_pages=chunk_pages,
            windows=windows,
            max_num_seqs=rows,
            max_num_batched_tokens=max(rows, chunk_pages * page_size) + spare_budget,
            pipeline_depth=depth,
            num_pages=2 + tokens // page_size,
            prefix_cache=cached,
        )
        self.device = StrictDevice(self.scheduler)
        self.sequences = []

    @rule(
        prompt=st.sampled_from([A, B, A[:9] + B, A[:17] + B[:1] + A]),
        length=st.integers(1, 34),
        max_tokens=st.integers(0, 14),
        stop_ids=st.sampled_from([(), (3,), (1, 7)]),
        priority=st.integers(0, 1),
        scores=st.sampled_from([None, None, 0]),
        n=st.sampled_from([1, 1, 3]),
    )
    def add(self, prompt, length, max_tokens, n, scores, **options):
        if self.scheduler.fits(length + max_tokens):
            for _ in range(n):
                self._add(prompt[:length], max_tokens=max_tokens, prompt_logprobs=scores, **options)

    def _add(self, prompt, **options):
        sequence = make_sequence(f"s{len(self.sequences)}", prompt=prompt, **options)
        self.scheduler.add(sequence)
        self.sequences.append(sequence)

    @precondition(lambda self: getattr(self, "sequences", None))
    @rule(data=st.data(), tail=st.integers(1, 9))
    def follow_up(self, data, tail):
        before = data.draw(st.sampled_from(self.sequences))
        prompt = [*before.token_ids, *range(50, 50 + tail)]
        if self.scheduler.fits(len(prompt) + 5):
            self._add(prompt, max_tokens=5)

    @invariant()
    def everything_that_runs_can_end(self):
        if not hasattr(self, "scheduler"):
            return
        tables, running = self.scheduler.tables, self.scheduler.running
        for index, (group, pool) in enumerate(zip(tables.groups, tables.pools, strict=True)):
            if group.window is None:
                to_come = (
                    tables.pages_for(one.max_num_tokens) - len(one.pages[index]) for one in running
                )
                assert sum(to_come) <= pool.num_free

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        run(self.device)
        for sequence in self.sequences:
            assert sequence.status is SequenceStatus.FINISHED
            assert sequence.num_in_flight == 0
            ids = sequence.token_ids[sequence.prompt_len :]
            positions = range(sequence.prompt_len, len(sequence.token_ids))
            assert ids == [position % 13 for position in positions]
            if sequence.finish_reason == "length":
                assert len(ids) == sequence.stop.max_tokens
        assert all(pool.num_used == 0 for pool in self.scheduler.tables.pools)


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), depth=st.integers(0, 1))
def test_first_come_first_served(lengths, depth):
    """A pool that holds one or two at a time: nobody is overtaken, so nobody starves."""
    scheduler = fixed_scheduler(num_pages=12, max_num_batched_tokens=16, pipeline_depth=depth)
    device = StrictDevice(scheduler)
    begun = []
    for index, length in enumerate(lengths):
        scheduler.add(make_sequence(str(index), prompt=B[:length], max_tokens=12))
    while device.has_work:
        device.step()
        begun += [one.seq_id for one in scheduler.running if one.seq_id not in begun]
    assert begun == [str(index) for index in range(len(lengths))]


def test_chunks_of_several_prompts_share_a_step_while_they_fit():
    scheduler = fixed_scheduler(max_num_batched_tokens=20)
    for index, length in enumerate((19, 3, 8, 9)):
        scheduler.add(make_sequence(str(index), prompt_len=length, max_tokens=1))
    steps = []
    while (plan := scheduler.schedule()) is not None:
        steps.append([(row.sequence.seq_id, row.start, row.num_tokens) for row in plan.rows])
        scheduler.update(plan, [RowResult([0] * row.num_sampled) for row in plan.rows])
    assert steps == [
        [("0", 0, 8), ("1", 0, 3), ("2", 0, 8)],
        [("0", 8, 8), ("3", 0, 8)],  # there was room for one token of it
        [("0", 16, 3), ("3", 8, 1)],
    ]


@pytest.mark.parametrize("depth", [0, 1])
def test_prompts_and_decodes_take_turns(depth):
    scheduler = fixed_scheduler(max_num_batched_tokens=8, pipeline_depth=depth)
    device = StrictDevice(scheduler)
    scheduler.add(make_sequence("stream", prompt=A[:5], max_tokens=12))
    device.step()
    scheduler.add(make_sequence("long", prompt=B[:40], max_tokens=2))
    kinds = ""
    while device.has_work:
        before = device.num_computed
        device.step()
        kinds += {0: "", 1: "d", 2: "d", 8: "p"}[device.num_computed - before]
    assert kinds.startswith("dpdpdpdpdpd")
    assert set(kinds[10:]) == {"d"}


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (16, 17, 16),
        (16, 16, 8),  # a token is left to compute, and so the chunk that it is in
        (23, 24, 16),  # the third chunk of the first was a shorter one
        (24, 25, 24),
        (7, 40, 0),
    ],
)
def test_only_whole_chunks_are_found_again(first, second, cached):
    device = StrictDevice(fixed_scheduler(prefix_cache=True))
    run(device, make_sequence("first", prompt=A[:first]))
    sequence = make_sequence("second", prompt=A[:second])
    run(device, sequence)
    assert sequence.num_cached == cached


def test_what_was_generated_is_computed_again_as_a_prompt():
    device = StrictDevice(fixed_scheduler(prefix_cache=True))
    first = make_sequence("turn 1", prompt=A[:10], max_tokens=20)
    run(device, first)
    second = make_sequence("turn 2", prompt=[*first.token_ids, 7, 8, 9])
    run(device, second)
    assert second.num_cached == 8
    third = make_sequence("turn 2 again", prompt=[*first.token_ids, 7, 8, 9])
    run(device, third)
    assert third.num_cached == 32


def test_shared_pages_are_set_aside_once():
    scheduler = fixed_scheduler(num_pages=1 + 10, prefix_cache=True, max_num_seqs=2)
    device = StrictDevice(scheduler)
    first, second = (
        make_sequence(name, prompt=[*A[:24], ord(name)], max_tokens=7) for name in "ab"
    )
    for sequence in (first, second):  # 8 pages each, of which 6 are the same
        scheduler.add(sequence)
    together = False
    while device.has_work:
        device.step()
        together |= len(scheduler.running) == 2
    assert together
    assert second.num_cached == 24


def test_room_for_the_whole_length_is_waited_for():
    scheduler = fixed_scheduler(num_pages=1 + 9)
    device = StrictDevice(scheduler)
    for name in "ab":  # 5 pages each in the end, 2 at first
        scheduler.add(make_sequence(name, prompt=A[:5], max_tokens=15))
    device.step()
    assert [sequence.seq_id for sequence in scheduler.running] == ["a"]
    run(device)
    scheduler.tables.pools[0].check_integrity({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunk_tokens": 40},
            r"chunk_tokens \(40\) must be at most max_num_batched_tokens \(32\)",
        ),
        ({"chunk_tokens": 6}, r"chunk_tokens \(6\) must be a multiple of the page size \(4\)"),
        ({"chunk_tokens": 8, "decode_steps": 4}, "one decode step at a time and no drafts, not"),
    ],
)
def test_what_goes_with_fixed_chunks(options, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(**options)


def test_fixed_chunks_go_without_drafts():
    with pytest.raises(ValueError, match="no drafts, not with 1 and 3"):
        SchedulerLimits(4, 16, 16, num_draft_tokens=3, chunk_tokens=8)
