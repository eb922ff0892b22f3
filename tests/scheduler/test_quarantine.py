"""Failed steps: exactly those that make them fail are ended, and the others notice nothing."""

from collections import Counter
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.scheduler.plan import PlannedRow
from jaxinfer.scheduler.quarantine import Quarantine
from jaxinfer.scheduler.sequence import SequenceStatus


class Driver:
    """Steps a scheduler on a pretend device on which some steps fail, as an engine would.

    Args:
      triggers: the position of a sequence from which on each step that computes it fails.
      accidents: numbers of steps that fail whoever is in them.
      fails_late: failures show when results are read, not when a step is dispatched.
    """

    def __init__(self, device, triggers=None, accidents=(), fails_late=False):
        self.device = device
        self.scheduler = device.scheduler
        self.triggers, self.accidents, self.fails_late = triggers or {}, accidents, fails_late
        self.steps = self.failures = 0
        self.pending = []
        self.delivered = {}
        self.scored = Counter()

    def step(self):
        broken = self.pending and self.pending[-1][1] is None and not self.fails_late
        plan = None if broken else self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            lost = self.fails_late and any(sampled is None for _, sampled in self.pending)
            fails = self.fails(plan)
            self.pending.append((plan, None if fails or lost else self.device._run(plan)))
            self.steps += 1
        depth = self.scheduler.limits.pipeline_depth
        if self.pending and (plan is None or len(self.pending) > depth):
            self.collect(*self.pending.pop(0))
            self.scheduler.check_integrity()

    def fails(self, plan):
        return self.steps in self.accidents or any(
            row.start + row.num_tokens > self.triggers[row.sequence]
            for row in plan.rows
            if row.sequence in self.triggers
        )

    def collect(self, plan, sampled):
        if sampled is not None:
            for row, result in self.scheduler.update(plan, sampled):
                sequence = row.sequence
                self.delivered.setdefault(sequence, []).extend(result.token_ids)
                if (first := row.score_from) is not None:
                    last = min(row.start + row.num_tokens, sequence.prompt_len - 1)
                    self.scored.update((sequence, at) for at in range(first, last))
            return
        self.failures += 1
        culprit = self.scheduler.fail(plan, [other for other, _ in self.pending])
        self.pending.clear()
        assert not self.scheduler.running
        assert all(pool.num_free == pool.num_total for pool in self.scheduler.tables.pools)
        self.device.memory.clear()
        self.device.table.clear()
        if culprit is not None:
            self.scheduler.finish(culprit, "error")

    def run(self):
        for _ in range(3000):
            if not (self.scheduler.has_work or self.pending):
                return
            self.step()
        raise AssertionError("not finished: something starved")


def expected_ids(sequence):
    first = sequence.prompt_len
    return [position % 13 for position in range(first, first + sequence.stop.max_tokens)]


def assert_whole(driver, sequence):
    assert sequence.finish_reason == "length"
    assert driver.delivered.get(sequence, []) == expected_ids(sequence)
    if sequence.scores_prompt:
        positions = [at for one, at in driver.scored.elements() if one is sequence]
        assert sorted(positions) == list(range(sequence.prompt_len - 1)), "each once"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_exactly_the_culprits_end(make_scheduler, make_sequence, pretend_device, data):
    draw = data.draw
    max_num_seqs = draw(st.integers(1, 8), "max_num_seqs")
    budget = draw(st.integers(max_num_seqs, 40), "budget")
    scheduler = make_scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        decode_steps=draw(st.integers(1, 4), "decode_steps"),
        pipeline_depth=draw(st.integers(0, 1), "depth"),
        num_pages=draw(st.integers(10, 60), "num_pages"),
        windows=draw(st.sampled_from([(None,), (None, 6)]), "windows"),
    )
    sequences = [
        make_sequence(
            f"s{index}",
            prompt_len=draw(st.integers(1, 20)),
            max_tokens=draw(st.integers(0, 12)),
            prompt_logprobs=draw(st.sampled_from([None, 0])),
            steps_in_bulk=draw(st.booleans()),
        )
        for index in range(draw(st.integers(1, 12), "sequences"))
    ]
    triggers = {}
    for sequence in sequences:
        # The last token that is sampled is never computed.
        computed = sequence.prompt_len + max(sequence.stop.max_tokens - 1, 0)
        if draw(st.booleans()):
            triggers[sequence] = draw(st.integers(0, computed - 1))
    driver = Driver(pretend_device(scheduler), triggers, fails_late=draw(st.booleans(), "late"))
    for sequence in sequences:
        scheduler.add(sequence)
    driver.run()
    for sequence in sequences:
        if sequence in triggers:
            assert sequence.finish_reason == "error"
            ids = driver.delivered.get(sequence, [])
            assert ids == expected_ids(sequence)[: len(ids)]
        else:
            assert_whole(driver, sequence)
    most = ceil(log2(max_num_seqs)) + 2
    assert len(triggers) <= driver.failures <= len(triggers) * most
    assert not scheduler.quarantine.is_active or not scheduler.has_work


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_step_that_fails_once_ends_nobody(make_scheduler, make_sequence, pretend_device, data):
    scheduler = make_scheduler(
        max_num_seqs=6,
        pipeline_depth=data.draw(st.integers(0, 1)),
        decode_steps=data.draw(st.integers(1, 3)),
        num_pages=data.draw(st.integers(10, 60)),
    )
    accident = data.draw(st.integers(0, 12))
    driver = Driver(pretend_device(scheduler), accidents={accident})
    sequences = [
        make_sequence(
            f"s{index}",
            prompt_len=1 + 3 * index,
            max_tokens=9,
            prompt_logprobs=0 if index == 2 else None,
        )
        for index in range(data.draw(st.integers(1, 8)))
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    driver.run()
    assert driver.failures == (driver.steps > accident)
    for sequence in sequences:
        assert_whole(driver, sequence)


def test_suspicion_ends_when_all_have_passed(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=64)
    driver = Driver(pretend_device(scheduler), accidents={2})
    for index in range(4):
        scheduler.add(make_sequence(f"s{index}", max_tokens=30))
    driver.step()
    driver.step()
    assert len(scheduler.running) == 4
    driver.step()
    assert scheduler.quarantine.is_active
    late = make_sequence("late", max_tokens=1)
    scheduler.add(late)
    seen = []
    while scheduler.quarantine.is_active:
        driver.step()
        seen.append(sorted(sequence.seq_id for sequence in scheduler.running))
    assert ["s0", "s1"] in seen
    assert ["s2", "s3"] in seen
    assert all(len(running) <= 2 for running in seen[:-1]), "nobody else runs meanwhile"
    assert late.status is SequenceStatus.WAITING or late.finish_reason == "length"
    driver.step()
    assert len(scheduler.running) == 4
    driver.run()
    assert late.finish_reason == "length"
    assert driver.failures == 1


def test_aborting_suspects_ends_the_suspicion(make_scheduler, make_sequence, pretend_device):
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=64)
    driver = Driver(pretend_device(scheduler), accidents={0})
    sequences = [make_sequence(f"s{index}", max_tokens=30) for index in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    driver.step()
    assert scheduler.quarantine.is_active
    for sequence in sequences:
        scheduler.finish(sequence, "abort")
    fresh = make_sequence("fresh")
    scheduler.add(fresh)
    driver.run()
    assert not scheduler.quarantine.is_active
    assert fresh.finish_reason == "length"


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 32])
def test_one_culprit_costs_a_logarithm(make_sequence, num_rows):
    """Without a scheduler: whoever may run is in the next step."""
    for guilty in range(num_rows):
        sequences = [make_sequence(f"s{index}") for index in range(num_rows)]
        quarantine = Quarantine()
        steps = failures = 0
        while True:
            quarantine.advance()
            rows = [
                PlannedRow(one, 0, 0, 5, (1,) * 5, num_sampled=1)
                for one in sequences
                if quarantine.allows(one) and one.status is not SequenceStatus.FINISHED
            ]
            steps += 1
            if sequences[guilty] not in [row.sequence for row in rows]:
                for row in rows:
                    quarantine.confirm(row)
                continue
            failures += 1
            culprit = quarantine.fail(rows)
            if culprit is not None:
                break
        assert culprit is sequences[guilty]
        assert failures <= ceil(log2(num_rows)) + 2
        assert steps <= 2 * ceil(log2(num_rows)) + 2
