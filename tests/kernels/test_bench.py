"""`python -m kernels.bench` prints a row per spec and ends with one JSON object."""

import json

import pytest

from kernels import bench


def test_last_line_is_json(capsys):
    bench.main(["paged_attention", "--spec", "mqa-soft-cap-mixed", "--repeats", "2"])
    *table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert [each["implementation"] for each in results] == ["xla", "reference"]
    assert all(each["ms"] > 0 and each["gb_per_s"] > 0 for each in results)
    assert sum(line.startswith("mqa-soft-cap-mixed") for line in table) == 2


def test_unknown_spec_lists_what_there_is(capsys):
    with pytest.raises(SystemExit):
        bench.main(["paged_attention", "--spec", "none"])
    assert "no spec 'none': pass one of smollm2-decode-2" in capsys.readouterr().err
