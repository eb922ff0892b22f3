"""`benchmarks/load_servers.py`: what it computes, servers that fail, and a tiny run."""

import asyncio
import sys
from importlib import import_module
from pathlib import Path

import pytest
from tiny_engine import VOCAB_SIZE
from tiny_server import tiny_server

from jaxinfer.load_test import spawn
from jaxinfer.load_test.record import RequestRecord

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # where scripts find each other
load_servers = import_module("load_servers")


@pytest.fixture
async def server(monkeypatch):
    async with tiny_server(monkeypatch) as running:
        yield running


def test_gaps_of_a_span_are_those_that_reach_into_it():
    records = [RequestRecord(0.0, 0.0, token_s=[1.0, 2.0, 4.0, 8.0]), RequestRecord(0.0, 0.0)]
    assert load_servers.gaps(records, 2.5, 3.0) == [2.0]
    assert load_servers.gaps(records, 2.0, 5.0) == [2.0, 4.0]
    assert load_servers.gaps(records, 0.0, float("inf")) == [1.0, 2.0, 4.0]


ROW = {
    "version": "1",
    "tok_s": {1: 1234.5, 4: 2.0},
    "shared_ttft_p50_s": 0.5,
    "shared_ttft_p99_s": 1.25,
    "idle_p99_ms": 10.0,
    "busy_p99_ms": 20.5,
    "busy_max_ms": 3012.3,
    "long_prompt_s": 2.0,
    "tokens_meanwhile": 5,
}


def test_the_table():
    found = {"jaxinfer": ROW, "vllm": {"error": "it | ended", "log": []}}
    head, rule, ours, theirs = load_servers.table(found, load_servers.QUICK).splitlines()
    assert head.startswith("| server | tok/s at 1 | tok/s at 4 | TTFT p50 of 8, s | p99 |")
    assert ours == "| jaxinfer | 1,234.5 | 2.0 | 0.5 | 1.25 | 10 | 20.5 | 3,012 | 2 |"
    assert theirs.startswith("| vllm | failed: it / ended |")
    assert len({line.count("|") for line in (head, rule, ours, theirs)}) == 1


STUB = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"


def test_a_server_that_does_not_start_says_why(monkeypatch):
    server = load_servers.Server("x", (), (sys.executable, "-c", STUB), needs="a file")
    found = load_servers.result(server, load_servers.QUICK)
    assert found == {
        "error": "the server ended with exit code 3 before it was ready",
        "log": ["no such model"],
    }
    missing = load_servers.Server("x", (), ("/no/such/program",), needs="a file")
    assert "No such file" in load_servers.result(missing, load_servers.QUICK)["error"]
    nothing = load_servers.Server("x", (), ("/no/such/program",))
    assert load_servers.result(nothing, load_servers.QUICK)["error"].startswith("no model")


def test_a_server_gets_its_own_variables_and_flags(tmp_path):
    script = (
        "import os, sys; print(os.environ['OURS'], sys.argv[1:3], file=sys.stderr); sys.exit(1)"
    )
    command = (sys.executable, "-c", script)
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises(ValueError, match="exit code 1"),
        spawn.spawned_server(["-a", "b"], command, {"OURS": "v"}, log),
    ):
        pass
    assert (tmp_path / "log").read_text() == "v ['-a', 'b']\n"


async def test_all_measurements_on_a_tiny_engine(server):
    plan = load_servers.Plan(
        levels=(1, 3), prompt_len=6, output_len=5, prefix_len=40, own_len=3, num_clients=4,
        num_streams=2, idle_len=20, stream_len=80, long_prompt=90, vocab_size=VOCAB_SIZE - 2,
    )  # fmt: skip
    found = await load_servers.measured(server.url, plan)
    assert found.keys() == ROW.keys()
    assert found["tok_s"].keys() == {1, 3}
    assert min(found["tok_s"].values()) > 0
    assert 0 < found["shared_ttft_p50_s"] <= found["shared_ttft_p99_s"]
    assert 0 < found["busy_p99_ms"] <= found["busy_max_ms"]
    assert found["tokens_meanwhile"] > 0
    metrics = await asyncio.to_thread(server.metrics)
    assert metrics["vllm:prefix_cache_hits_total"] > 0


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"prompt_len": 500}, "a request failed: 400: This model's maximum context"),
        ({"prompt_len": 8, "output_len": 500}, "120 tokens came, 500 were asked for"),
    ],
)
async def test_answers_that_do_not_count(server, lengths, message):
    plan = load_servers.Plan(levels=(1,), min_requests=1, vocab_size=VOCAB_SIZE - 2, **lengths)
    with pytest.raises(ValueError, match=message):
        await load_servers.measured(server.url, plan)
