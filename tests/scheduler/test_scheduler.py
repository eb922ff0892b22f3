import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.builders import count_prompt_tokens

from jaxinfer.scheduler.sequence import SequenceStatus


def expected_ids(sequence):
    """What the pretend device samples, until a stop id or the limit."""
    ids = []
    for position in range(sequence.prompt_len, sequence.prompt_len + sequence.stop.max_tokens):
        ids.append(position % 13)
        if ids[-1] in sequence.stop.stop_ids:
            break
    return ids


def run_all(device, arrivals, max_steps=5000):
    """Adds (step, sequence) arrivals as their step comes, and steps until nothing is left."""
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    for step in range(max_steps):
        while arrivals and arrivals[0][0] <= step:
            device.scheduler.add(arrivals.pop(0)[1])
        if not arrivals and not device.has_work:
            return
        device.step()
    raise AssertionError("the load was never finished: something starved")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_loads_finish_whole_and_leave_nothing(
    make_scheduler, make_sequence, pretend_device, data
):
    draw = data.draw
    page_size = draw(st.sampled_from([1, 3, 4, 16]), "page_size")
    windows = draw(st.sampled_from([(None,), (None, 6), (5,), (3, None)]), "windows")
    max_num_seqs = draw(st.integers(1, 6), "max_num_seqs")
    budget = draw(st.integers(max_num_seqs, 24), "budget")
    scheduler = make_scheduler(
        page_size=page_size,
        windows=windows,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=draw(st.integers(1, budget), "chunk"),
        decode_steps=draw(st.integers(1, 5), "decode_steps"),
        pipeline_depth=draw(st.integers(0, 1), "depth"),
        num_pages=draw(st.integers(2, 2 + 100 // page_size), "num_pages"),
    )
    arrivals = []
    for index in range(draw(st.integers(1, 12), "sequences")):
        sequence = make_sequence(
            f"s{index}",
            prompt_len=draw(st.integers(1, 22)),
            max_tokens=draw(st.integers(0, 18)),
            stop_ids=draw(st.sampled_from([(), (3,), (1, 7)])),
            priority=draw(st.integers(0, 1)),
            steps_in_bulk=draw(st.booleans()),
        )
        if scheduler.fits(sequence.prompt_len + sequence.stop.max_tokens):
            arrivals.append((draw(st.integers(0, 20)), sequence))
    run_all(pretend_device(scheduler), arrivals)
    for _, sequence in arrivals:
        assert sequence.status is SequenceStatus.FINISHED
        assert sequence.token_ids[sequence.prompt_len :] == expected_ids(sequence)
        assert sequence.num_in_flight == 0
    for pool in scheduler.tables.pools:
        assert pool.num_free == pool.num_total


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_aborts_at_random_moments_give_everything_back(
    make_scheduler, make_sequence, pretend_device, data
):
    scheduler = make_scheduler(
        num_pages=14,
        max_num_seqs=3,
        pipeline_depth=data.draw(st.integers(0, 1)),
        decode_steps=data.draw(st.integers(1, 3)),
    )
    device = pretend_device(scheduler)
    sequences = [make_sequence(f"s{i}", prompt_len=7, max_tokens=20) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    doomed = data.draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=6))
    for step in range(400):
        for when, index in doomed:
            if when == step and sequences[index].status is not SequenceStatus.FINISHED:
                scheduler.finish(sequences[index], "abort")
        device.step()
    assert not device.has_work
    assert scheduler.tables.pools[0].num_used == 0
    for sequence in sequences:
        if sequence.finish_reason == "length":
            assert sequence.token_ids[7:] == expected_ids(sequence)


def test_a_pool_too_small_for_the_load_preempts_the_newest(
    make_scheduler, make_sequence, pretend_device
):
    scheduler = make_scheduler(num_pages=9, page_size=4, max_num_seqs=4)
    sequences = [make_sequence(f"s{i}", prompt_len=8, max_tokens=16) for i in range(3)]
    run_all(pretend_device(scheduler), [(0, sequence) for sequence in sequences])
    assert scheduler.num_preemptions > 0
    assert sequences[0].num_preemptions == 0, "the oldest is never preempted"
    for sequence in sequences:
        assert sequence.token_ids[8:] == expected_ids(sequence)


def test_decodes_ride_along_with_prefill_chunks(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(max_num_batched_tokens=16, max_prefill_chunk_tokens=6)
    device = pretend_device(scheduler)
    first = make_sequence("first", prompt_len=5, max_tokens=30)
    scheduler.add(first)
    device.step()
    scheduler.add(make_sequence("second", prompt_len=20, max_tokens=2))
    for expected_output in (2, 3, 4):
        plan = scheduler.schedule()
        assert (plan.num_decodes, count_prompt_tokens(plan)) == (1, 6)
        device.pending.append((plan, device._run(plan)))
        scheduler.update(*device.pending.pop())
        assert len(first.token_ids) - first.prompt_len == expected_output


def test_bulk_steps_need_a_quiet_engine(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(decode_steps=16, max_num_seqs=1, pipeline_depth=0)
    device = pretend_device(scheduler)
    scheduler.add(make_sequence("running", prompt_len=4, max_tokens=40))
    device.step()
    assert scheduler.schedule().num_steps == 8, "max_decode_steps_before_prefill bounds it"
    scheduler.add(make_sequence("waiting", prompt_len=4, max_tokens=40))
    assert scheduler._bulk_steps() == 1


def test_bulk_steps_are_for_few_rows(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(decode_steps=4, bulk_rows=2, max_num_seqs=3, pipeline_depth=0)
    device = pretend_device(scheduler)
    for index, length in enumerate((12, 12, 3)):
        scheduler.add(make_sequence(str(index), prompt_len=4, max_tokens=length))
    num_steps = {}
    while device.has_work:
        num_rows = len(scheduler.running)
        num_steps.setdefault(num_rows, set()).add(scheduler._bulk_steps())
        device.step()
    assert num_steps == {0: {1}, 3: {1}, 2: {4}}


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_strings_forbid_bulk_steps(make_scheduler, make_sequence, pretend_device, depth):
    scheduler = make_scheduler(decode_steps=4, pipeline_depth=depth)
    device = pretend_device(scheduler)
    scheduler.add(make_sequence("s", max_tokens=9, steps_in_bulk=False))
    while device.has_work:
        plan_sizes = [row.num_tokens for plan, _ in device.pending for row in plan.rows]
        assert all(size == 1 or size == 5 for size in plan_sizes)
        device.step()


def test_lower_priority_numbers_run_first(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(max_num_seqs=1)
    late = make_sequence("late", priority=1, max_tokens=2)
    soon = make_sequence("soon", priority=0, max_tokens=2)
    scheduler.add(late)
    scheduler.add(soon)
    plan = scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [soon]


def test_a_request_that_can_never_fit_is_refused(make_scheduler, make_sequence):
    scheduler = make_scheduler(num_pages=5, page_size=4)
    with pytest.raises(ValueError, match="may reach 17 tokens, but the KV pool holds 16"):
        scheduler.add(make_sequence(prompt_len=9, max_tokens=8))


def test_a_window_frees_pages_it_has_left(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(
        windows=(None, 8), page_size=4, num_pages=40, max_num_batched_tokens=8
    )
    device = pretend_device(scheduler)
    sequence = make_sequence(prompt_len=30, max_tokens=40)
    scheduler.add(sequence)
    most = 0
    while sequence.status is not SequenceStatus.FINISHED:
        device.step()
        most = max(most, scheduler.tables.pools[1].num_used)
    assert most <= scheduler.tables.most_pages(70, 8, scheduler.tables.groups[1]) == 5


def test_the_budget_must_hold_every_running_sequence(make_scheduler):
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least"):
        make_scheduler(max_num_seqs=4, max_num_batched_tokens=3)
