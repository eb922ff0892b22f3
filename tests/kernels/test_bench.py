"""`python -m kernels.bench` prints a row per spec and ends with one JSON object."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import bench, tuning
from kernels.quantized_matmul import cpu, xla
from kernels.quantized_matmul.format import CPU_BLOCKS, LAYOUTS, dequantize
from kernels.quantized_matmul.specs import SPECS


def test_last_line_is_json(capsys):
    names = ("--implementation", "xla", "--implementation", "reference")
    bench.main(["paged_attention", "--spec", "mqa-soft-cap-mixed", "--repeats", "2", *names])
    *table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert [each["implementation"] for each in results] == ["xla", "reference"]
    assert all(each["ms"] > 0 and each["gb_per_s"] > 0 for each in results)
    assert sum(line.startswith("mqa-soft-cap-mixed") for line in table) == 2


def test_what_an_implementation_refuses_is_told_and_left_out(capsys, monkeypatch):
    def refuse(x, w):
        raise NotImplementedError("not today")

    monkeypatch.setattr(bench, "measured_bandwidth", lambda: 1e9)
    monkeypatch.setattr(xla, "supports", refuse)
    names = ("--implementation", "xla", "--implementation", "reference")
    bench.main(["quantized_matmul", "--spec", "int8-offset-g32-decode-8", "--repeats", "1", *names])
    *table, last = capsys.readouterr().out.splitlines()
    assert [each["implementation"] for each in json.loads(last)["results"]] == ["reference"]
    assert any("xla" in line and "not today" in line for line in table)


def test_weights_are_laid_out_as_engines_do(monkeypatch):
    monkeypatch.setattr(cpu, "best_layout", lambda w: CPU_BLOCKS)
    spec = SPECS["uint4-g32-decode-8"]
    call, (x, w) = spec.prepare("cpu", "cpu")
    assert w.layout == CPU_BLOCKS
    plain_call, (_, plain) = spec.prepare("cpu", "reference")
    assert plain.layout == LAYOUTS["cpu"]
    np.testing.assert_array_equal(dequantize(w), dequantize(plain))
    if not cpu.is_available() or cpu.best_layout(w) == plain.layout:
        return
    expected = plain_call(x, plain)
    np.testing.assert_allclose(call(x, w), expected, rtol=1e-5, atol=1e-5)


def test_unknown_spec_lists_what_there_is(capsys):
    with pytest.raises(SystemExit):
        bench.main(["paged_attention", "--spec", "none"])
    assert "no spec 'none': pass one of smollm2-decode-2" in capsys.readouterr().err


@dataclasses.dataclass(frozen=True)
class Knob:
    size: int


def test_tuning_saves_the_fastest_config_that_runs(tmp_path, monkeypatch, capsys):
    def counted(function, inputs, repeats):
        # Work instead of time: a clock on a busy machine may find 32 sines no faster than 64.
        return float(len(jax.make_jaxpr(lambda *args: function(*args))(*inputs).eqns))

    monkeypatch.setattr(bench, "median_seconds", counted)
    monkeypatch.setattr(tuning, "TUNED_FOLDER", tmp_path)

    def function(x):
        config = tuning.choose("op/impl", "call", "Chip", Knob(64))
        if config.size < 4:
            raise ValueError("no such block")
        for _ in range(config.size):
            x = jnp.sin(x)
        return x

    bench.tune(function, (jnp.ones((128, 128)),), 3, tmp_path)
    assert json.loads((tmp_path / "chip.json").read_text()) == {"op/impl": {"call": {"size": 4}}}
    assert "op/impl call: Knob(size=4), saved in" in capsys.readouterr().out
    tuning._tuned.cache_clear()
