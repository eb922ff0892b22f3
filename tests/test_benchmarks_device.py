"""`benchmarks/device.py` runs end to end on tiny shapes, and nothing that goes wrong is hidden."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import jax.numpy as jnp
import pytest

from kernels.quantized_matmul import xla

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where scripts find each other
device, device_log, device_numerics, device_report, device_timing, device_worker = (
    import_module(name)
    for name in (
        "device",
        *("device_log", "device_numerics", "device_report", "device_timing"),
        "device_worker",
    )
)
FAILED, OK = device_log.FAILED, device_log.OK
REFUSED, OUT_OF_MEMORY = device_log.REFUSED, device_log.OUT_OF_MEMORY
OUT_OF_TIME = device_log.OUT_OF_TIME
Result = device_log.Result


@pytest.fixture
def log(tmp_path):
    log = device_log.Log(tmp_path / "device.jsonl")
    options = {"deadline_s": 600, "began": time.time(), "tiny": True}
    log.append("options", sections=["bandwidth", "numerics", "models"], **options)
    return log


@pytest.fixture
def worker(log):
    log.end(Result("bandwidth", "copy and read", OK, {"copy_gb_per_s": 10.0}))
    return device_worker.Worker(log)


@pytest.mark.sweep
@pytest.mark.slow
def test_tiny(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    result = subprocess.run(
        [sys.executable, "benchmarks/device.py", "--tiny", "--output", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "device.json").read_text())
    assert found["header"]["platform"] == "cpu"
    assert {each["status"] for each in found["results"]} == {OK}
    sections = ("bandwidth", "numerics", "attention", "matmul", "models", "all layers")
    assert tuple(dict.fromkeys(each["section"] for each in found["results"])) == sections
    assert {each["verdict"] for each in found["targets"]} == {"not measured here"}
    # What a section leaves on the device: nothing but scalars.
    assert max(found["live_bytes"].values()) < 1000
    values = {each["name"]: each["values"] for each in found["results"]}
    assert values["int4 L=2 decode 2"]["host_us"] > 0
    assert values["bf16 L=3 decode 2"]["tok_per_s"] > 0
    assert values["tiny-up-int4-1 xla"]["gb_per_s"] > 0
    for line in ("=== numerics", "int4 prefill at 3 layers", "not measured here"):
        assert line in result.stdout
    assert "| bf16 L=3 decode 2 |" in (tmp_path / "device.md").read_text()
    assert (tmp_path / "device.png").exists() or "no plot: " in result.stdout


STUB = """
import os, sys, time
from pathlib import Path
from device_log import Log, Result

log = Log(Path(sys.argv[1]))
done = [each.name for each in log.results()]
for name, limit_s in (("crashes", 60), ("hangs", 0.1), ("lost", 60), ("works", 60)):
    if name in done:
        continue
    log.begin("numerics", name, limit_s)
    if name == "crashes":
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    log.end(Result("numerics", name, "failed" if name == "lost" else "ok"))
    if name == "lost":
        os._exit(70)
"""


def test_a_crash_and_a_hang_cost_one_case_each(log, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    device.supervise(log, [sys.executable, "-c", STUB, str(log.path)])
    assert {each.name: each.status for each in log.results()} == {
        "crashes": FAILED,
        "hangs": FAILED,
        "lost": FAILED,
        "works": OK,
    }
    errors = {each.name: each.error for each in log.results()}
    assert errors["crashes"] == "the process ended with exit code 9"
    assert "killed" in errors["hangs"]
    assert "FAILED numerics crashes" in capsys.readouterr().out


def test_a_worker_that_never_starts_is_a_failure(log):
    device.supervise(log, [sys.executable, "-c", "raise SystemExit(3)"])
    [failure] = device_report.failures(device_report.make_report(log))
    assert (failure.section, failure.error) == ("worker", "the process ended with exit code 3")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no"), FAILED),
        (NotImplementedError("head_dim 3"), REFUSED),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), OUT_OF_MEMORY),
        (MemoryError("too small"), OUT_OF_MEMORY),
        (TimeoutError("slow"), OUT_OF_TIME),
    ],
)
def test_a_case_that_raises_ends_alone(worker, error, status, capsys):
    with worker.case("numerics", "bad") as values:
        values["error"] = 1.0
        raise error
    result = worker.log.results()[-1]
    assert (result.name, result.status, result.values) == ("bad", status, {"error": 1.0})
    assert str(error) in result.error
    assert ("Traceback" in capsys.readouterr().out) == (status == FAILED)
    assert not worker.wants("numerics", "bad")


@pytest.mark.sweep
@pytest.mark.slow
def test_a_section_that_raises_leaves_the_others(worker, capsys):
    ran = []

    def broken(_):
        raise ValueError("broken section")

    worker.sections = ["numerics", "models"]
    worker.run({"numerics": broken, "models": lambda _: ran.append("models")})
    assert ran == ["models"]
    assert "broken section" in capsys.readouterr().out
    assert [each.section for each in device_report.failures(device_report.make_report(worker.log))]


def test_after_the_deadline_nothing_begins(log):
    log.path.unlink()
    log.append("options", sections=["numerics"], deadline_s=1, began=time.time() - 2, tiny=True)
    assert not device_worker.Worker(log).wants("numerics", "late")
    assert log.results()[-1].status == OUT_OF_TIME


def test_numerics_see_a_wrong_kernel(worker, monkeypatch):
    right = xla.matmul
    monkeypatch.setattr(xla, "matmul", lambda x, w, out_dtype: right(x, w, out_dtype) + 1e-3)
    worker.sizes = dataclasses.replace(worker.sizes, num_specs=1)
    device_numerics.numerics(worker)
    ends = {name: each for (section, name), each in worker.found.items() if section == "numerics"}
    wrong = ends["quantized_matmul int8-decode-1 xla"]
    assert wrong.status == FAILED
    assert "WrongResultError" in wrong.error
    assert wrong.values["error"] > 9e-4
    other = ends["paged_attention smollm2-decode-2 xla"]
    assert (other.status, other.error) == (OK, "")


def test_compiling_while_time_is_taken_is_an_error():
    x = jnp.zeros(7)
    with pytest.raises(RuntimeError, match="compiled while"), device_timing.compiling_nothing():
        (x * 3.5).block_until_ready()


class TestReport:
    """4 and 8 layers of 0.1 ms on a rest of 0.2 ms; 1 GB a layer and 2 GB for the head."""

    def results(self, scheme, factor=1.0):
        for layers in (4, 8):
            values = {"layers": layers, "full": 32, "case": f"{scheme} decode 1", "tokens": 1}
            values |= {"device_ms": factor * (0.2 + 0.1 * layers), "host_us": 150.0}
            values["num_bytes"] = factor * (2 + layers) * 1e9
            if layers == 8:
                values["extrapolate_with"] = f"{scheme} L=4 decode 1"
            yield Result("models", f"{scheme} L={layers} decode 1", OK, values)

    def report(self, log, *results):
        log.path.unlink()
        log.append("options", sections=[], tiny=False)
        log.end(Result("bandwidth", "copy and read", OK, {"copy_gb_per_s": 20000.0}))
        for result in results:
            log.end(result)
        return device_report.make_report(log)

    def test_layers_are_extrapolated(self, log):
        report = self.report(log, *self.results("bf16"))
        [(name, values)] = report.of_section("all layers").items()
        assert name == "bf16 decode 1 at 32 layers, from 4 and 8"
        assert values["device_ms"] == pytest.approx(3.4)
        assert values["per_layer_ms"] == pytest.approx(0.1)
        assert values["rest_ms"] == pytest.approx(0.2)
        assert values["tok_per_s"] == pytest.approx(1000 / 3.4)
        assert values["of_copy"] == pytest.approx(34 / 3.4e-3 / 20000)

    def test_a_host_that_is_slower_than_the_device_decides(self, log):
        cases = [
            dataclasses.replace(each, values=each.values | {"host_us": 5000.0})
            for each in self.results("bf16")
        ]
        [values] = self.report(log, *cases).of_section("all layers").values()
        assert values["tok_per_s"] == pytest.approx(200)

    def verdicts(self, report):
        return {text: (verdict, found) for text, verdict, found in report.targets}

    def test_targets(self, log):
        shares = {
            "B=16 S=2048 int8 xla": 0.1,
            "B=16 S=2048 int8 pallas": 0.9,
            "B=64 S=8192 bfloat16 pallas": 0.79,
            "B=16 S=512 int8 pallas": 0.3,
        }
        report = self.report(
            log,
            *(Result("attention", n, OK, {"of_copy": share}) for n, share in shares.items()),
            Result("matmul", "llama8b-up-int4-16 pallas", OK, {"of_copy": 0.71}),
            Result("matmul", "llama8b-up-int4-64 pallas", OK, {"of_copy": 0.2}),
            Result("matmul", "llama8b-up-int4-g32-1 pallas", OK, {"of_copy": 0.2}),
            Result("models", "bf16 L=32", OK, {"case": "bf16 decode 64", "tok_per_s": 7500.0}),
            *self.results("bf16"),
            *self.results("int8", factor=0.5),
        )
        verdicts = self.verdicts(report)
        by_start = lambda start: next(v for text, v in verdicts.items() if text.startswith(start))
        verdict, found = by_start("decode attention from 2k context, 16")
        assert (verdict, found.partition(" (")[0]) == ("missed", "79.0% at worst")
        assert by_start("decode attention from 2k context, one")[0] == "not measured here"
        assert by_start("int4 matmul")[0] == "met"
        assert by_start("int8 matmul")[0] == "not measured here"
        assert by_start("8B decode at B=1: int8")[0] == "met"
        assert by_start("8B bf16 decode at B=64") == ("met", "7,500 (bf16 L=32)")
        assert by_start("host")[0] == "met"

    def test_what_did_not_end_well_is_in_the_tables(self, log, tmp_path):
        bad = Result("matmul", "call xla", FAILED, {"ms": 1.0}, "ValueError: bad\nmore")
        report = self.report(log, bad, Result("matmul", "big xla", OUT_OF_MEMORY))
        assert device_report.failures(report) == [bad]
        device_report.write(report, tmp_path)
        text = (tmp_path / "device.md").read_text()
        assert "- call xla: failed. ValueError: bad\n" in text
        assert "- big xla: out of memory. \n" in text
        assert "FAILED matmul call xla: ValueError: bad" in device_report.summary(report)
