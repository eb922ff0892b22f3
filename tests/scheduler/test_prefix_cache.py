"""Pages found again: that they hold the right tokens, are counted, given back and forgotten."""

import pytest
from scheduler.builders import PretendDevice, make_scheduler, make_sequence

from jaxinfer.scheduler.plan import RowResult

PAGE_SIZE = 4
A, B = [100 + i for i in range(40)], [200 + i for i in range(40)]


def run(device, *sequences):
    """Runs sequences that arrive together to their end; returns how many tokens were computed."""
    before = device.num_computed
    for sequence in sequences:
        device.scheduler.add(sequence)
    for _ in range(2000):
        if not device.has_work:
            return device.num_computed - before
        device.step()
    raise AssertionError("the load was never finished: something starved")


def cached_scheduler(**options):
    return make_scheduler(**{"prefix_cache": True, "page_size": PAGE_SIZE, **options})


@pytest.fixture(params=[0, 1], ids=["depth 0", "depth 1"])
def depth(request):
    return request.param


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (33, 32)]
)
def test_full_pages_are_found_but_never_the_last_token(depth, length, expected):
    device = PretendDevice(cached_scheduler(pipeline_depth=depth))
    first, second = (make_sequence(name, prompt=A[:length]) for name in "ab")
    cold, warm = run(device, first), run(device, second)
    assert (first.num_cached, second.num_cached) == (0, expected)
    assert cold - warm == expected
    cache = device.scheduler.cache
    assert (cache.num_queried_tokens, cache.num_hit_tokens) == (2 * length, expected)


def test_the_next_turn_finds_what_was_generated(depth):
    device = PretendDevice(cached_scheduler(pipeline_depth=depth, decode_steps=3))
    first = make_sequence("turn 1", prompt=A[:10], max_tokens=9)
    run(device, first)
    second = make_sequence("turn 2", prompt=[*first.token_ids, 7, 8, 9])
    run(device, second)
    # The last token of the first turn was sampled and never computed: 18 positions, 4 full pages.
    assert second.num_cached == 16


def test_another_tail_another_head_another_salt():
    device = PretendDevice(cached_scheduler())
    run(device, make_sequence("a", prompt=A))
    for prompt, salt, expected in (
        (A[:17] + B, b"", 16),
        (B[:4] + A[4:], b"", 0),
        (A, b"mine", 0),
        (A, b"", 36),
        (A, b"mine", 36),
    ):
        sequence = make_sequence("b", prompt=prompt, cache_salt=salt, max_tokens=1)
        run(device, sequence)
        assert sequence.num_cached == expected


def test_siblings_wait_for_the_first_and_share_its_pages(depth):
    device = PretendDevice(cached_scheduler(pipeline_depth=depth, max_num_batched_tokens=64))
    siblings = [make_sequence(f"r/{i}", prompt=A[:21], max_tokens=6) for i in range(4)]
    computed = run(device, *siblings)
    assert [sequence.num_cached for sequence in siblings] == [0, 20, 20, 20]
    assert computed == 21 + 3 * 1 + 4 * 5


def test_one_that_waits_is_overtaken_but_not_forgotten():
    scheduler = cached_scheduler(max_num_batched_tokens=8)
    device = PretendDevice(scheduler)
    first, same, other = (
        make_sequence(name, prompt=prompt, max_tokens=9)
        for name, prompt in (("first", A[:8]), ("same", A[:12]), ("other", B[:3]))
    )
    for sequence in (first, same, other):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [first]
    scheduler.update(plan, device._run(plan))
    plan = scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [first, same, other]
    assert same.num_cached == 8


def test_others_run_while_one_waits():
    scheduler = cached_scheduler(max_num_batched_tokens=16)
    first, same, other = (
        make_sequence(name, prompt=prompt, max_tokens=9)
        for name, prompt in (("first", A[:8]), ("same", A[:12]), ("other", B[:3]))
    )
    for sequence in (first, same, other):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [row.sequence for row in plan.rows] == [first, other]
    assert scheduler.waiting == [same]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_who_waits_computes_itself_when_the_other_leaves(reason):
    scheduler = cached_scheduler(max_num_batched_tokens=8)
    device = PretendDevice(scheduler)
    first, same = (make_sequence(name, prompt=A[:24]) for name in ("first", "same"))
    scheduler.add(first)
    scheduler.add(same)
    device.step()
    assert scheduler.waiting == [same]
    scheduler.finish(first, reason)
    while device.has_work:
        device.step()
    assert same.num_cached == 8, "what was computed when the other left"
    assert same.finish_reason == "length"


def test_a_scored_prompt_is_computed_whole_and_leaves_its_pages():
    device = PretendDevice(cached_scheduler())
    for name, scores, expected in (("a", 0, 0), ("b", 0, 0), ("c", None, 20)):
        sequence = make_sequence(name, prompt=A[:21], prompt_logprobs=scores)
        run(device, sequence)
        assert sequence.num_cached == expected
    assert device.scheduler.cache.num_queried_tokens == 21


def test_what_is_not_finite_is_not_found_and_what_it_used_neither(depth):
    device = PretendDevice(cached_scheduler(pipeline_depth=depth))
    run(device, make_sequence("clean", prompt=A[:20]))
    device.spoilt = {"bad"}
    bad = make_sequence("bad", prompt=A[:30], max_tokens=9)
    run(device, bad)
    assert (bad.num_cached, bad.finish_reason) == (20, "error")
    after = make_sequence("after", prompt=A[:30])
    run(device, after)
    assert (after.num_cached, after.finish_reason) == (0, "length")
    again = make_sequence("again", prompt=A[:30])
    run(device, again)
    assert again.num_cached == 28


def test_a_result_that_is_not_finite_counts_also_after_a_preemption():
    scheduler = cached_scheduler(pipeline_depth=1)
    device = PretendDevice(scheduler)
    run(device, make_sequence("clean", prompt=A[:20]))
    bad = make_sequence("bad", prompt=A[:30])
    scheduler.add(bad)
    plan = scheduler.schedule()
    assert bad.num_cached == 20
    scheduler._preempt_all()
    scheduler.update(plan, [RowResult([], finite=False)])
    scheduler.check_integrity()
    assert all(pool.num_idle == 0 for pool in scheduler.tables.pools)


def test_clearing_also_silences_what_runs(depth):
    scheduler = cached_scheduler(pipeline_depth=depth, max_num_batched_tokens=8)
    device = PretendDevice(scheduler)
    run(device, make_sequence("old", prompt=B))
    running = make_sequence("running", prompt=A[:30], max_tokens=9)
    scheduler.add(running)
    for _ in range(2):
        device.step()
    scheduler.clear_prefix_cache()
    scheduler.check_integrity()
    assert all(pool.num_idle == 0 for pool in scheduler.tables.pools)
    run(device)
    for prompt in (A, B):
        sequence = make_sequence("new", prompt=prompt)
        run(device, sequence)
        assert sequence.num_cached == 0


def test_a_preempted_sequence_finds_itself():
    scheduler = cached_scheduler(num_pages=12)
    device = PretendDevice(scheduler)
    old = make_sequence("old", prompt=B[:8], max_tokens=20)
    new = make_sequence("new", prompt=A[:8], max_tokens=20)
    run(device, old, new)
    assert new.num_preemptions > 0
    assert old.num_preemptions == 0
    cold = PretendDevice(make_scheduler(num_pages=12))
    again = [make_sequence("old", prompt=B[:8], max_tokens=20)]
    again.append(make_sequence("new", prompt=A[:8], max_tokens=20))
    run(cold, *again)
    assert device.num_computed < cold.num_computed
    assert new.num_cached == 0, "the client's share is that of the first admission"


def test_pages_idle_for_longest_go_first_and_the_tail_before_the_head():
    scheduler = cached_scheduler(num_pages=13)  # 12
    device = PretendDevice(scheduler)
    run(device, make_sequence("a", prompt=A[:17], max_tokens=1))
    run(device, make_sequence("b", prompt=B[:17], max_tokens=1))
    pool = scheduler.tables.pools[0]
    assert (pool.num_free, pool.num_idle) == (12, 8)
    run(device, make_sequence("c", prompt=range(24), max_tokens=1))  # needs 7, of which 4 are free
    sizes = []
    for prompt in (B, A):
        sequence = make_sequence("d", prompt=prompt[:17], max_tokens=1)
        run(device, sequence)
        sizes.append(sequence.num_cached)
    assert sizes == [16, 4]


def test_pages_that_are_shared_count_once():
    scheduler = cached_scheduler(num_pages=13, max_num_seqs=3)
    device = PretendDevice(scheduler)
    run(device, make_sequence("warm", prompt=A[:25], max_tokens=1))
    three = [make_sequence(str(i), prompt=A[:25], max_tokens=4) for i in range(3)]
    for sequence in three:
        scheduler.add(sequence)
    device.step()
    # Alone each needs 8 pages of the 12; together 6 that they share and one or two each.
    assert len(scheduler.running) == 3
    assert scheduler.tables.pools[0].num_used == 6 + 3
    run(device)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 11])
def test_a_window_needs_only_what_it_sees(depth, window):
    scheduler = cached_scheduler(
        windows=(None, window), max_num_batched_tokens=8, pipeline_depth=depth
    )
    device = PretendDevice(scheduler)
    run(device, make_sequence("a", prompt=A, max_tokens=1))
    sequence = make_sequence("b", prompt=A[:30] + B, max_tokens=1)
    scheduler.add(sequence)
    device.step()
    assert sequence.num_cached == 28
    full, windowed = sequence.pages
    assert 0 not in full
    hidden = max(0, 28 - window + 1) // PAGE_SIZE
    assert [page == 0 for page in windowed[:7]] == [index < hidden for index in range(7)]
    run(device)


def test_a_hit_may_end_before_the_longest_run_where_a_window_lost_its_pages():
    scheduler = cached_scheduler(windows=(None, 6), max_num_batched_tokens=8)
    device = PretendDevice(scheduler)
    run(device, make_sequence("a", prompt=A, max_tokens=1))
    windowed = scheduler.tables.pools[1]
    keys = make_sequence("k", prompt=A)
    scheduler.cache.find(keys)
    windowed.forget([keys.page_keys[6]])
    for length, expected in ((40, 36), (36, 24), (26, 24), (24, 20)):
        assert scheduler.cache.find(make_sequence("b", prompt=A[:length])) * 4 == expected


@pytest.mark.parametrize("windows", [(5,), (None, 6), (13, 3)])
@pytest.mark.parametrize("budget", [8, 9, 14])
def test_one_that_fits_alone_is_never_preempted(depth, windows, budget):
    """Pages behind a window are kept until they are published, and that much room is asked for."""
    num_fitting = 0
    for num_pages in range(4, 20):
        scheduler = cached_scheduler(
            windows=windows,
            num_pages=num_pages,
            max_num_batched_tokens=budget,
            pipeline_depth=depth,
        )
        if scheduler.fits(49):
            num_fitting += 1
            run(PretendDevice(scheduler), make_sequence(prompt=A, max_tokens=9))
            assert scheduler.num_preemptions == 0
    assert num_fitting


def test_results_from_before_a_preemption_confirm_nothing():
    scheduler = cached_scheduler(pipeline_depth=1, max_num_batched_tokens=8)
    device = PretendDevice(scheduler)
    sequence = make_sequence(prompt=A)
    scheduler.add(sequence)
    before = scheduler.schedule()
    sampled = device._run(before)
    scheduler._preempt_all()
    device.pending.append((scheduler.schedule(), None))
    assert (sequence.num_admissions, sequence.num_computed) == (2, 8)
    scheduler.update(before, sampled)
    scheduler.check_integrity()
    assert sequence.num_confirmed == 0
    assert scheduler.cache._num_found(make_sequence(prompt=A)) == 0


def test_a_stop_token_is_never_computed(depth):
    scheduler = cached_scheduler(pipeline_depth=depth, decode_steps=4)
    device = PretendDevice(scheduler)
    first = make_sequence("a", prompt=A[:13], max_tokens=9, stop_ids=[15 % 13])
    run(device, first)
    assert (len(first.token_ids), first.finish_reason) == (16, "stop")
    second = make_sequence("b", prompt=[*first.token_ids, 5])
    run(device, second)
    assert second.num_cached == 12


def test_keys_are_made_once_and_only_at_the_head_of_the_queue():
    scheduler = cached_scheduler(max_num_seqs=1)
    device = PretendDevice(scheduler)
    sequences = [make_sequence(str(i), prompt=A[i:]) for i in range(100)]
    for sequence in sequences:
        scheduler.add(sequence)
    device.step()
    assert [len(sequence.page_keys) for sequence in sequences[:2]] == [10, 0]
    assert not any(sequence.page_keys for sequence in sequences[1:])
