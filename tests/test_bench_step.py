"""`jaxinfer bench step`: every program is measured as itself, and its bytes are the profile's."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_engine

from jaxinfer import bench_step, cli, step_driver
from jaxinfer.bench_step import HEADER, StepBench, StepCost
from jaxinfer.config import ConfigError
from jaxinfer.step_driver import StepDriver
from jaxinfer.step_profile import Traffic

CONTEXT, STEPS = 9, 4


@pytest.fixture
def driver():
    model, groups = tiny_engine.tiny_model()
    yield StepDriver(tiny_engine.shared().engine, model, groups)
    tiny_engine.empty(tiny_engine.shared().engine)


def test_every_program_is_measured_as_itself(driver, monkeypatch):
    runner = driver.engine.runner
    ran = []
    monkeypatch.setattr(
        runner,
        "_executables",
        {key: watched(key, run, ran) for key, run in runner._executables.items()},
    )
    costs = list(StepBench(driver, CONTEXT, STEPS).costs())
    found = {(cost.kind, cost.rung): cost for cost in costs}
    assert len(found) == len(costs)
    assert found.keys() == runner._executables.keys()
    for key, cost in found.items():
        # Each of the steps, and those that come before the measured ones.
        assert ran.count(key) > STEPS, key
        assert 0 < cost.host_s < 60
        assert 0 < cost.seconds < 60
    assert found["decode", 4].what == "4 × 1 at 15 of context"
    assert found["decode_k", 2].what == "2 × 4 at 33 of context"
    assert found["decode_k", 2].num_tokens == 8
    assert found["ragged", 32].what == "prompts of 32"


def watched(key, run, ran):
    def call(*arguments):
        ran.append(key)
        return run(*arguments)

    return call


def test_bytes_and_flops(driver):
    bench = StepBench(driver, CONTEXT, STEPS)
    traffic = Traffic.of(driver.model, driver.groups, driver.engine)
    costs = {(cost.kind, cost.rung): cost for cost in bench.costs()}
    moved = traffic.of_step(2, [33, 33], layers_are_one=True)
    assert costs["decode_k", 2].num_bytes == 4 * sum(moved.values())
    moved = traffic.of_step(32, [32], layers_are_one=True)
    assert costs["ragged", 32].num_bytes == sum(moved.values())
    config = driver.model.config
    heads = config.num_heads + 2 * config.num_kv_heads
    layer = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    layers, head = config.num_layers * layer, config.hidden_size * config.vocab_size
    assert costs["decode", 4].flops == 2 * 4 * (layers + head)
    assert costs["ragged", 32].flops == 2 * (32 * layers + head)


def test_prompts_are_no_longer_than_the_context(driver, monkeypatch):
    monkeypatch.setattr(driver.engine, "max_model_len", 12)
    cost = StepBench(driver, CONTEXT, STEPS)._ragged(32)
    assert (cost.what, cost.num_tokens) == ("prompts of 11 + 11 + 10", 32)


def test_a_pool_that_is_too_small(driver, monkeypatch):
    runner = driver.engine.runner
    monkeypatch.setattr(runner, "config", replace(runner.config, num_pages=128))
    with pytest.raises(ConfigError, match="holds 508 tokens, and 4 sequences of 128 need 512"):
        next(StepBench(driver, CONTEXT, STEPS).costs())


def test_steps_of_another_program_are_refused(driver, monkeypatch):
    add = StepDriver.add
    monkeypatch.setattr(StepDriver, "add", lambda self, *arguments: add(self, *arguments[:2]))
    with pytest.raises(RuntimeError, match=r"decode\[2\] gave .*8.*; expected 2"):
        next(StepBench(driver, CONTEXT, STEPS).costs())


def test_no_prompt_begins_as_another():
    requests = []
    driver = StepDriver.__new__(StepDriver)
    driver.engine = SimpleNamespace(vocab_size=25, add=requests.append)
    for index in range(600):
        driver.add(index % 5 + 2, 1)
    assert len({request.prompt_token_ids[:2] for request in requests}) == 600
    assert [len(request.prompt_token_ids) for request in requests[:5]] == [2, 3, 4, 5, 6]
    driver.add(1, 1)
    assert len(requests[-1].prompt_token_ids) == 1


COST = StepCost("decode", 8, "8 × 1 at 20 of context", 8, 0.002, 0.0001, 6_000_000, 40_000_000)


def test_rates():
    assert COST.as_json() == {
        "program": "decode[8]",
        "what": "8 × 1 at 20 of context",
        "ms": 2.0,
        "host_us": 100.0,
        "bytes": 6_000_000,
        "gb_per_s": 3.0,
        "tokens_per_s": 4000.0,
        "gflop_per_s": 20.0,
    }
    row = COST.row().split()
    assert row[:7] == ["decode[8]", "2.00", "100", "6.0", "3.0", "4,000", "20"]
    assert len(HEADER) == len(COST.row()) - len("  " + COST.what)


def test_medians_leave_preparations_out():
    clock = SimpleNamespace(now=0.0)
    durations = iter([1.0, 5.0, 2.0])

    def prepare():
        clock.now += 100.0

    def step():
        clock.now += next(durations)

    clock.perf_counter = clock.thread_time = lambda: clock.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_step, "time", clock)
        assert bench_step._medians(step, 3, prepare) == (2.0, 2.0)


def test_the_command(monkeypatch, capsys):
    tokenizer = tiny_engine.shared().tokenizer
    monkeypatch.setattr(step_driver, "open_model", lambda config: (None, None, tokenizer))
    monkeypatch.setattr(step_driver, "load_model", lambda *_: tiny_engine.tiny_model())
    monkeypatch.setattr(step_driver, "set_compilation_cache", lambda directory: None)
    flags = ["--exact", "--page-size", "4", "--max-num-seqs", "2", "--max-num-batched-tokens", "8"]
    assert cli.main(["bench", "step", "--context", "8", "--steps", "2", *flags]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    names = [program["program"] for program in found["programs"]]
    assert names == ["decode[2]", "decode_k[2]", "ragged[8]"]
    assert [line.split()[0] for line in table] == ["program", *names]
    assert all(np.isfinite(program["gb_per_s"]) for program in found["programs"])
    assert found["versions"]["jax"]


def test_a_context_that_is_too_short_is_refused(capsys):
    assert cli.main(["bench", "step", "--max-model-len", "512"]) == cli.EXIT_USAGE
    assert "max_model_len is 512, and what is measured needs 608" in capsys.readouterr().err
