"""`jaxinfer bench serve`: requests, arrivals, what a client records, and the numbers made of it."""

import asyncio
import contextlib
import importlib
import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import cli
from jaxinfer.config import ConfigError
from jaxinfer.load_test import plot, spawn
from jaxinfer.load_test.client import LoadClient, Target, first_model, make_session
from jaxinfer.load_test.metrics import Distribution, Slo, Summary, percentile, tokens_over_time
from jaxinfer.load_test.record import RequestRecord
from jaxinfer.load_test.spawn import spawned_server
from jaxinfer.load_test.workload import LoadRequest, RandomLengths, Replay, arrival_times

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
lengths = importlib.import_module("lengths")

# Numbers.

seconds = st.floats(0, 1e3)


@given(st.lists(seconds, min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share))


def test_distribution():
    found = Distribution.of([0.004, 0.001, 0.002, 0.003, 0.005])
    assert found.as_json() == {"mean": 3.0, "p50": 3.0, "p90": 4.6, "p99": 4.96}
    assert Distribution.of([]) is None


RECORDS = [
    RequestRecord(0.0, 0.0, 1.0, [0.25, 0.5, 1.0], 10, 4, 4),
    RequestRecord(0.5, 0.75, 1.25, [1.25], 20, 0, 1),
    RequestRecord(1.0, 1.0, 4.0, [1.5, 4.0], 30, 0, 2),
    RequestRecord(1.0, 1.0, 1.5, error="429", message="the queue is full"),
    RequestRecord(1.5, 1.5, 2.0, [1.75], 5, 0, 1, "429", "another"),
]


def test_summary_is_exact():
    found = Summary.of(RECORDS, Slo.parse("ttft:500, tpot:1000")).as_json()
    assert found == {
        "duration_s": 4.0,
        "num_requests": 5,
        "num_completed": 3,
        "errors": {"429": 2},
        "requests_per_s": 0.75,
        "output_tokens_per_s": 1.75,
        "tokens_per_s": 16.75,
        "prompt_tokens": 60,
        "cached_tokens": 4,
        "output_tokens": 7,
        "peak_in_flight": 3,
        "ttft_ms": {"mean": 416.667, "p50": 500.0, "p90": 500.0, "p99": 500.0},
        "itl_ms": {"mean": 1083.333, "p50": 500.0, "p90": 2100.0, "p99": 2460.0},
        # 750 ms for three tokens after the first, 2.5 s for one; a single token has none.
        "tpot_ms": {"mean": 1375.0, "p50": 1375.0, "p90": 2275.0, "p99": 2477.5},
        "e2e_ms": {"mean": 1500.0, "p50": 1000.0, "p90": 2600.0, "p99": 2960.0},
        "lag_ms": {"mean": 50.0, "p50": 0.0, "p90": 150.0, "p99": 240.0},
        "goodput": {
            "slo_ms": {"ttft": 500.0, "tpot": 1000.0},
            "share": 0.4,
            "requests_per_s": 0.5,
        },
    }


def test_table_says_the_same():
    lines = Summary.of(RECORDS, Slo.parse("e2e:1000")).table().splitlines()
    assert lines[0] == "3 of 5 requests in 4.0 s, 3 at once at most: 0.75 requests/s"
    assert lines[1] == "tokens: 60 in (4 cached), 7 out: 1.8 out/s, 16.8 in all"
    assert lines[3].split() == ["ttft", "416.7", "500.0", "500.0", "500.0"]
    assert lines[-2] == "goodput: 0.50 requests/s (40.0%) with e2e ≤ 1000 ms"
    assert lines[-1] == "failed: 2 × 429: the queue is full"


def test_nothing_came_through():
    summary = Summary.of(RECORDS[3:4])
    assert (summary.as_json()["ttft_ms"], summary.as_json()["goodput"]) == (None, None)
    assert "ttft" in summary.table()


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "itl:5", "ttft:-1", "tpot:nan", "e2e:inf"])
def test_bad_slos(text):
    with pytest.raises(ConfigError, match="an SLO"):
        Slo.parse(text)


moments = st.lists(seconds, min_size=1, max_size=5).map(sorted)


@given(st.lists(st.tuples(moments, st.integers(1, 50)), max_size=4), st.floats(0.5, 30))
def test_tokens_over_time_lose_none(answers, width_s):
    records = [
        RequestRecord(0.0, 0.0, times[-1], times, output_tokens=tokens) for times, tokens in answers
    ]
    total = sum(rate * width_s for rate in tokens_over_time(records, width_s))
    assert total == pytest.approx(sum(tokens for _, tokens in answers))


# Requests.


@given(
    lengths=st.builds(
        RandomLengths,
        input_len=st.integers(1, 40),
        output_len=st.integers(1, 40),
        range_ratio=st.floats(0, 1),
        shared_prefix_len=st.integers(0, 9),
        num_prefixes=st.integers(1, 4),
    ),
    count=st.integers(1, 12),
    vocab_size=st.integers(1, 300),
    seed=st.integers(),
)
def test_random_requests(lengths, count, vocab_size, seed):
    requests = lengths.requests(count, vocab_size, seed)
    assert requests == lengths.requests(count, vocab_size, seed)
    # More of them begin with the same.
    assert requests == lengths.requests(count + 3, vocab_size, seed)[:count]
    ratio, shared = lengths.range_ratio, lengths.shared_prefix_len
    for index, request in enumerate(requests):
        assert request.prompt[:shared] == requests[index % lengths.num_prefixes].prompt[:shared]
        for length, mean in (
            (len(request.prompt) - shared, lengths.input_len),
            (request.output_tokens, lengths.output_len),
        ):
            assert length >= 1
            assert abs(length - mean) <= ratio * mean + 1e-6
        assert all(0 <= token < vocab_size for token in request.prompt)


def test_lengths_reach_both_bounds_and_prompts_differ():
    requests = RandomLengths(10, 20, 0.1, 3, 2).requests(400, 32000, 1)
    assert {len(request.prompt) for request in requests} == {12, 13, 14}
    assert {request.output_tokens for request in requests} == {18, 19, 20, 21, 22}
    assert len({request.prompt[:3] for request in requests}) == 2
    assert len({request.prompt[3:] for request in requests}) == 400
    assert requests != RandomLengths(10, 20, 0.1, 3, 2).requests(400, 32000, 2)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (16.0, 0.25)])
def test_arrivals(burstiness, variation):
    requests = [LoadRequest((1,), 1)] * 20001
    times = arrival_times(requests, 5.0, burstiness, 0)
    gaps = np.diff(times)
    assert (times[0], gaps.min() >= 0) == (0.0, True)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times == arrival_times(requests, 5.0, burstiness, 0)
    assert times != arrival_times(requests, 5.0, burstiness, 1)


def test_arrivals_all_at_once_and_as_recorded():
    requests = [LoadRequest((1,), 1, moment) for moment in (7.0, 5.5, 9.0)]
    assert arrival_times(requests, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(requests, None, 1.0, 0) == [1.5, 0.0, 3.5]


def write(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_replay(tmp_path):
    path = write(
        tmp_path / "x",
        {"prompt_tokens": 3, "output_tokens": 2},
        {"prompt_tokens": [5, 6], "output_tokens": 4},
    )
    replay = Replay.read(path)
    requests = replay.requests(3, 100, 0)
    assert [len(request.prompt) for request in requests] == [3, 2, 3]
    assert [request.output_tokens for request in requests] == [2, 4, 2]
    assert requests[1].prompt == (5, 6)
    assert requests[0].prompt != requests[2].prompt
    assert requests == replay.requests(3, 100, 0)


def test_replay_with_arrivals(tmp_path):
    line = {"prompt_tokens": 3, "output_tokens": 2}
    replay = Replay.read(write(tmp_path / "x", line | {"arrival_s": 1}, line | {"arrival_s": 2.5}))
    assert [request.arrival_s for request in replay.requests(2, 100, 0)] == [1, 2.5]
    with pytest.raises(ConfigError, match=r"--num-requests is 3, but .* arrivals of 2"):
        replay.requests(3, 100, 0)
    with pytest.raises(ConfigError, match="1 of 2 lines have arrival_s"):
        Replay.read(write(tmp_path / "x", line | {"arrival_s": 1}, line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "must be a JSON object"),
        ({"output_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": 0, "output_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": [], "output_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": ["a"], "output_tokens": 1}, "prompt_tokens"),
        ({"prompt_tokens": 1, "output_tokens": 0}, r"output_tokens .* \(got 0\)"),
        ({"prompt_tokens": 1, "output_tokens": True}, "output_tokens"),
        ({"prompt_tokens": 1, "output_tokens": 1, "arrival_s": -1}, "arrival_s"),
        ({"prompt_tokens": 1, "output_tokens": 1, "arrival_s": "x"}, "arrival_s"),
    ],
)
def test_bad_replays(tmp_path, line, message):
    good = {"prompt_tokens": 1, "output_tokens": 1}
    with pytest.raises(ConfigError, match=f"line 2.*{message}"):
        Replay.read(write(tmp_path / "x", good, line))


def test_replays_that_are_no_json_or_nothing(tmp_path):
    path = tmp_path / "x"
    path.write_text("{")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        Replay.read(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        Replay.read(path)


def test_the_lengths_we_ship_are_those_their_script_draws():
    assert lengths.FILE.read_text(encoding="utf-8").splitlines() == lengths.lines()
    requests = Replay.read(lengths.FILE).requests(500, 100, 0)
    for values in ([len(r.prompt) for r in requests], [r.output_tokens for r in requests]):
        assert 4 <= min(values) < np.median(values) < np.mean(values) < max(values) <= 1024


# A client and a server.


class FakeServer:
    """Streams as many tokens as are asked for; a prompt's first id says how it fails.

    Attributes:
      bodies: what was asked for.
      first_s, gap_s: before the first token, and between two.
      hold: how many requests must be there before any is answered.
      num_open, most_open: requests being answered, now and at most.
    """

    def __init__(self):
        self.url = ""
        self.bodies = []
        self.first_s = self.gap_s = 0.0
        self.hold = 0
        self.num_open = self.most_open = 0
        self._all_there = asyncio.Event()

    async def models(self, request):
        return web.json_response({"data": [{"id": "fake"}]})

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if len(self.bodies) >= self.hold:
            self._all_there.set()
        await self._all_there.wait()
        try:
            return await self._answer(request, body)
        finally:
            self.num_open -= 1

    async def _answer(self, request, body):
        failure = {1: "429", 2: "event", 3: "cut", 4: "not json", 5: "hang", 6: "drop", 7: "list"}
        failure = failure.get(body["prompt"][0])
        if failure == "429":
            error = {"error": {"message": "the queue is full", "code": "queue_full"}}
            return web.json_response(error, status=429)
        response = web.StreamResponse()
        await response.prepare(request)

        async def send(text):
            await response.write(f"data: {text}\n\n".encode())

        def chunk(text, usage=None):
            choices = [] if usage else [{"index": 0, "text": text}]
            return json.dumps({"choices": choices, "usage": usage})

        await response.write(b": comment\n\n")
        await send(chunk(""))  # no token yet
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.gap_s if index else self.first_s)
            await send(chunk("ü" * 10))
            if failure == "event":
                await send(json.dumps({"error": {"message": "it broke"}}))
            elif failure == "cut":
                return response
            elif failure == "not json":
                await send("{")
            elif failure == "list":
                await send("[1]")
            elif failure == "hang":
                await asyncio.sleep(60)
            elif failure == "drop":
                request.transport.abort()
                return response
        details = {"cached_tokens": 3}
        usage = {"prompt_tokens": 11, "prompt_tokens_details": details}
        if body["prompt"][0] != 8:
            await send(chunk("", usage | {"completion_tokens": body["max_tokens"]}))
        await send("[DONE]")
        return response


@pytest.fixture
async def fake():
    server = FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
async def client(fake):
    async with make_session("secret") as session:
        done = []
        load = LoadClient(session, Target(fake.url, "fake", 20.0), lambda: done.append(1))
        load.done = done
        yield load


def request_of(first, output_tokens=3):
    return LoadRequest((first, 50, 51), output_tokens)


async def test_latencies_are_those_of_the_server(fake, client):
    fake.first_s, fake.gap_s = 0.08, 0.03
    record = await client.send(request_of(0, 4), 0.0)
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 4, 11)
    assert record.cached_tokens == 3
    assert 0.08 <= record.ttft_s < 2
    assert len(record.itl_s) == 3
    # A late first answer shortens the gap after it.
    assert sum(record.itl_s) >= 0.06
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / 3)
    assert record.e2e_s >= 0.08 + 3 * 0.03
    assert fake.bodies == [
        {
            "model": "fake",
            "prompt": [0, 50, 51],
            "max_tokens": 4,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_without_usage_events_are_counted(client):
    record = await client.send(request_of(8), 0.0)
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 3, 3)


async def test_an_open_loop_waits_for_no_answer(fake, client):
    fake.hold = 8  # nothing is answered until all are there
    requests = [request_of(0) for _ in range(8)]
    async with asyncio.timeout(15):
        records = await client.open_loop(requests, [0.02 * index for index in range(8)])
    assert [record.error for record in records] == [None] * 8
    assert fake.most_open == Summary.of(records).peak_in_flight == 8
    assert [record.planned_s for record in records] == [0.02 * index for index in range(8)]
    assert all(record.start_s >= record.planned_s - 1e-3 for record in records)
    assert len(client.done) == 8


async def test_a_closed_loop_keeps_so_many_in_flight(fake, client):
    fake.gap_s = 0.005
    records = await client.closed_loop([request_of(0) for _ in range(9)], 3)
    assert (len(records), fake.most_open) == (9, 3)


async def test_errors_are_counted(fake, client):
    client._target = Target(fake.url, "fake", 1.0)
    requests = [request_of(first) for first in (0, 1, 2, 3, 4, 5, 6, 7, 1)]
    records = await client.closed_loop(requests, 9)
    summary = Summary.of(records)
    assert summary.errors == {
        "429": 2,
        "error event": 1,
        "incomplete": 1,
        "JSONDecodeError": 1,
        "timeout": 1,
        "ClientPayloadError": 1,
        "malformed": 1,
    }
    assert summary.messages["429"] == "the queue is full"
    assert summary.messages["error event"] == "it broke"
    assert summary.messages["timeout"] == "no complete answer after 1 s"
    assert summary.num_completed == 1


async def test_a_server_that_is_gone(client):
    client._target = Target("http://127.0.0.1:9", "fake", 5.0)
    record = await client.send(request_of(0), 0.0)
    assert record.error == "ClientConnectorError"
    assert record.ttft_s is None


async def test_models_that_cannot_be_listed(fake):
    async with make_session(None) as session:
        assert await first_model(session, fake.url) == "fake"
        with pytest.raises(ValueError, match="/nothing/v1/models answered 404"):
            await first_model(session, fake.url + "/nothing")


# The command.


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
    path = write(tmp_path / "x", line | {"arrival_s": 5.0}, line | {"arrival_s": 5.2})
    assert await run("--url", fake.url, "--replay", str(path), "--warmup", "0") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["duration_s"] >= 0.2
    assert found["load"] == {"seed": 0, "replay": "x", "num_requests": 2}
    assert await run("--url", fake.url, "--replay", str(path), "--concurrency", "1") == 0


async def test_nothing_came_through_is_a_failure(fake, tmp_path, capsys):
    path = write(tmp_path / "x", {"prompt_tokens": [1], "output_tokens": 2})
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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert await run("--url", fake.url, "--plot", "x.png") == cli.EXIT_USAGE
    assert "pip install 'jaxinfer[bench]'" in capsys.readouterr().err
    assert fake.bodies == []


def test_what_is_drawn(tmp_path):
    figure_class = MagicMock()
    axes = [MagicMock() for _ in range(3)]
    figure_class.return_value.subplots.return_value = axes
    plot.draw(figure_class, RECORDS, "title", tmp_path / "x.png")
    assert axes[0].ecdf.call_args.args == ([250.0, 500.0, 500.0],)
    assert axes[1].ecdf.call_args.args == ([250.0, 500.0, 2500.0],)
    heights, edges = axes[2].stairs.call_args.args
    assert (heights, edges) == (
        [8 / 3, 4 / 3 + 1 + 1, 0.0, 0.0, 1.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    )
    figure_class.return_value.savefig.assert_called_once_with(tmp_path / "x.png", dpi=120)


def test_a_real_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    plot.draw(plot.load_figure(), RECORDS, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    plot.draw(plot.load_figure(), RECORDS[3:4], "nothing came through", path)


# A server of its own.

STUB = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[1:3] == ["--model", "m"], sys.argv
class Handler(http.server.BaseHTTPRequestHandler):
    answers = [503, 503]
    def do_GET(self):
        self.send_response(self.answers.pop() if self.answers else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_spawned_server_is_waited_for_and_stopped(monkeypatch):
    monkeypatch.setattr(spawn, "COMMAND", (sys.executable, "-c", STUB))
    started = []
    popen = spawn.subprocess.Popen
    monkeypatch.setattr(
        spawn.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    with contextlib.suppress(KeyError), spawned_server(["--model", "m"]) as url:
        assert url.startswith("http://127.0.0.1:")
        assert started[0].poll() is None
        raise KeyError("what is measured fails")
    assert started[0].poll() is not None


def test_a_spawned_server_that_ends(capfd):
    flags = ["--num-requests", "1", "--spawn", "--rate", "1", "--", "--max-num-seqs", "0"]
    assert cli.main(["bench", "serve", *flags]) == cli.EXIT_FAILURE
    said = capfd.readouterr().err
    assert "max_num_seqs must be at least 1" in said  # the server's own words
    assert "the server ended with exit code 2 before it was ready" in said
