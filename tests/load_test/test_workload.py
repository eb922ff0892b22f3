"""The requests of a load test and when they are sent."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.builders import write_replay

from jaxinfer.config import ConfigError
from jaxinfer.load_test.workload import LoadRequest, RandomLengths, Replay, arrival_times

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
lengths = importlib.import_module("lengths")


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


def test_replay(tmp_path):
    path = write_replay(
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
    replay = Replay.read(
        write_replay(tmp_path / "x", line | {"arrival_s": 1}, line | {"arrival_s": 2.5})
    )
    assert [request.arrival_s for request in replay.requests(2, 100, 0)] == [1, 2.5]
    with pytest.raises(ConfigError, match=r"--num-requests is 3, but .* arrivals of 2"):
        replay.requests(3, 100, 0)
    with pytest.raises(ConfigError, match="1 of 2 lines have arrival_s"):
        Replay.read(write_replay(tmp_path / "x", line | {"arrival_s": 1}, line))


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
        Replay.read(write_replay(tmp_path / "x", good, line))


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
