"""Tuned block sizes: what a kernel gets, and how the fastest are found and kept."""

import dataclasses
import json
import math

import pytest

from kernels import tuning


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    stages: int = 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED_FOLDER", tmp_path)
    tuning._tuned.cache_clear()
    yield tmp_path
    tuning._tuned.cache_clear()


def test_a_miss_gives_the_heuristic(folder):
    assert tuning.choose("op/impl", "call", "Some Chip", Config(8)) == Config(8)


def test_what_was_saved_is_found_for_that_device_kernel_and_call_only(folder):
    path = tuning.save("Some Chip v2", "op/impl", {"call": Config(32, 4)}, folder)
    assert path.name == "some_chip_v2.json"
    assert tuning.choose("op/impl", "call", "Some Chip v2", Config(8)) == Config(32, 4)
    for kernel, call, kind in (
        ("op/other", "call", "Some Chip v2"),
        ("op/impl", "other", "Some Chip v2"),
        ("op/impl", "call", "Some Chip"),
    ):
        assert tuning.choose(kernel, call, kind, Config(8)) == Config(8)


def test_saving_keeps_other_entries_and_a_table_may_set_some_fields(folder):
    tuning.save("Chip", "op/impl", {"a": Config(16)}, folder)
    path = tuning.save("Chip", "op/impl", {"b": Config(64)}, folder)
    table = json.loads(path.read_text())
    assert sorted(table["op/impl"]) == ["a", "b"]
    del table["op/impl"]["a"]["stages"]
    path.write_text(json.dumps(table))
    tuning._tuned.cache_clear()
    assert tuning.choose("op/impl", "a", "Chip", Config(8, stages=7)) == Config(16, stages=7)


def test_a_forced_config_wins_where_it_is_of_the_kernels_class(folder):
    @dataclasses.dataclass(frozen=True)
    class Other:
        rows: int

    tuning.save("Chip", "op/impl", {"call": Config(16)}, folder)
    with tuning.force(Config(128)):
        assert tuning.choose("op/impl", "call", "Chip", Config(8)) == Config(128)
        assert tuning.choose("op/other", "call", "Chip", Other(3)) == Other(3)
    assert tuning.choose("op/impl", "call", "Chip", Config(8)) == Config(16)


def test_requests_are_recorded(folder):
    with tuning.record() as asked:
        tuning.choose("op/impl", "call", "Chip", Config(8))
    tuning.choose("op/impl", "later", "Chip", Config(8))
    assert asked == [tuning.Request("op/impl", "call", "Chip", Config(8))]


def test_climbing_finds_the_fastest_and_steps_around_what_does_not_run():
    def seconds(config):
        if config.stages > 4 or config.rows > 256:
            return math.inf
        return abs(math.log2(config.rows / 64)) + abs(config.stages - 4)

    assert tuning.climb(Config(8, 1), seconds) == Config(64, 4)


def test_climbing_stops_at_its_budget():
    timed = []

    def seconds(config):
        timed.append(config)
        return -config.rows

    tuning.climb(Config(1), seconds, max_timed=10)
    assert len(timed) == len(set(timed)) == 10
