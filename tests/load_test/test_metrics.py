"""The numbers made of what a client records, and the pictures of them."""

from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.builders import RECORDS

from jaxinfer.config import ConfigError
from jaxinfer.load_test import plot
from jaxinfer.load_test.metrics import Distribution, Slo, Summary, percentile, tokens_over_time
from jaxinfer.load_test.record import RequestRecord

seconds = st.floats(0, 1e3)


@given(st.lists(seconds, min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values, share):
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share))


def test_distribution():
    found = Distribution.of([0.004, 0.001, 0.002, 0.003, 0.005])
    assert found.as_json() == {"mean": 3.0, "p50": 3.0, "p90": 4.6, "p99": 4.96}
    assert Distribution.of([]) is None


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


# Pictures of them.


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
