"""`jaxinfer bench serve`: the command; tests/load_test has what it is made of."""

import asyncio
import json
import sys

import pytest
from canned_server import CannedServer
from load_test.builders import write_replay

from jaxinfer import cli
from jaxinfer.load_test.workload import RandomLengths


@pytest.fixture
async def fake():
    async with CannedServer().running() as server:
        yield server


async def run(*words):
    return await asyncio.to_thread(cli.main, ["bench", "serve", *words])


async def test_the_command(fake, tmp_path, capsys):
    path = tmp_path / "all.json"
    flags = ("--num-requests", "6", "--output-len", "5", "--warmup", "1", "--vocab-size", "9")
    flags += ("--input-len", "4", "--shared-prefix-len", "2", "--slo", "ttft:5000")
    # A first id from 1 to 7 fails: this seed's shared prefix begins with another.
    seed = next(
        s for s in range(99) if RandomLengths(4, 5, 0.0, 2).requests(1, 9, s)[0].prompt[0] == 0
    )
    code = await run(
        "--url", fake.url + "/", "--rate", "200", "--seed", str(seed), "--json", str(path), *flags
    )
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert code == 0
    assert table[0].startswith("6 of 6 requests in ")
    assert (found["model"], found["num_completed"], found["output_tokens"]) == ("fake", 6, 30)
    assert found["goodput"]["share"] == 1.0
    assert found["load"] == {
        "rate": 200.0,
        "seed": seed,
        "input_len": 4,
        "output_len": 5,
        "shared_prefix_len": 2,
        "num_requests": 6,
    }
    everything = json.loads(path.read_text())
    assert len(everything.pop("requests")) == 6
    assert everything == found
    measured = fake.bodies[1:]  # the first is the warm-up's
    assert len({tuple(body["prompt"][:2]) for body in measured}) == 1
    assert len({tuple(body["prompt"]) for body in measured}) == 6


async def test_a_replay_keeps_its_times(fake, tmp_path, capsys):
    line = {"prompt_tokens": [0, 1], "output_tokens": 2}
    path = write_replay(tmp_path / "x", line | {"arrival_s": 5.0}, line | {"arrival_s": 5.2})
    assert await run("--url", fake.url, "--replay", str(path), "--warmup", "0") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["duration_s"] >= 0.2
    assert found["load"] == {"seed": 0, "replay": "x", "num_requests": 2}
    assert await run("--url", fake.url, "--replay", str(path), "--concurrency", "1") == 0


async def test_nothing_came_through_is_a_failure(fake, tmp_path, capsys):
    path = write_replay(tmp_path / "x", {"prompt_tokens": [1], "output_tokens": 2})
    assert await run("--url", fake.url, "--replay", str(path), "--warmup", "0") == 1
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1])["errors"] == {"429": 1}
    assert json.loads(out[-1])["load"]["concurrency"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate: must be above 0"),
        (["--rate", "1", "--concurrency", "2"], "not allowed with"),
        (["--spawn", "--url", "x"], "not allowed with"),
        (["--range-ratio", "1.5"], "must be from 0 to 1"),
        (["--slo", "itl:3"], "an SLO bounds ttft, tpot, e2e"),
        (["--burstiness", "2"], "give --rate"),
        (["--replay", "x", "--output-len", "5"], "--output-len: --replay says"),
        (["--", "--model", "x"], "go with --spawn"),
    ],
)
def test_flags_that_are_refused(capsys, flags, message):
    try:
        code = cli.main(["bench", "serve", *flags])
    except SystemExit as exited:
        code = exited.code
    assert code == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_bench_itself_takes_no_part_after_its_flags(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--concurrency", "4", "serve"])
    assert "unrecognized arguments: serve" in capsys.readouterr().err


async def test_a_plot_without_matplotlib_is_refused_before_anything_is_sent(
    fake, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert await run("--url", fake.url, "--plot", "x.png") == cli.EXIT_USAGE
    assert "pip install 'jaxinfer[bench]'" in capsys.readouterr().err
    assert fake.bodies == []
