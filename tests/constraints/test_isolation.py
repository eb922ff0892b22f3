"""The process that tries grammars may hang, die or be short of memory: nothing else does."""

import gc
import time
import weakref
from pathlib import Path

import pytest

from jaxinfer.constraints import isolation, trial
from jaxinfer.constraints.isolation import Trials
from jaxinfer.request import QueueFullError

VOCABULARY = {"size": 258, "special": {256: "<s>", 257: "</s>"}, "eos": 257}
GOOD = 'start: "a"'


@pytest.fixture
def trials():
    trials = Trials()
    yield trials
    trials.close()


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts a script in the place of the one that tries grammars."""

    def replace(script):
        path = tmp_path / "stand_in.py"
        path.write_text(f"import os, sys, time\n{script}\n")
        monkeypatch.setattr(trial, "__file__", str(path))

    return replace


def test_a_grammar_that_compiles_comes_back_as_lark(trials):
    assert trials.run(GOOD, True, VOCABULARY) == GOOD
    assert "start:" in trials.run('root ::= "a" | "b"', True, VOCABULARY)
    with pytest.raises(ValueError, match="unknown name"):
        trials.run("start: b", True, VOCABULARY)


def test_one_process_serves_many_grammars_and_vocabularies(trials):
    trials.run(GOOD, True, VOCABULARY)
    first = trials._process.pid
    other = {"size": 300, "special": {7: "<|call|>"}, "eos": None}
    trials.run('start: <|call|> "a"', True, other)
    with pytest.raises(ValueError, match="unknown special token"):
        trials.run('start: <|call|> "a"', True, VOCABULARY)
    assert trials._process.pid == first


def test_one_that_dies_is_replaced(trials):
    trials.run(GOOD, True, VOCABULARY)
    trials._process.kill()
    trials._process.wait()
    assert trials.run(GOOD, True, VOCABULARY) == GOOD


@pytest.mark.parametrize(
    "script",
    [
        "sys.exit(1)",
        "sys.stdin.readline(); os.abort()",
        "sys.stdin.readline(); print('{', end='', flush=True); os._exit(0)",
        "sys.stdin.readline(); time.sleep(60)",
        "time.sleep(60)",
    ],
)
def test_what_ends_it_is_refused(trials, stand_in, monkeypatch, script):
    monkeypatch.setattr(isolation, "TIME_LIMIT_S", 0.5)
    stand_in(script)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"does not compile within 0\.5 s, 1024 MiB"):
        trials.run(GOOD, True, VOCABULARY)
    assert time.monotonic() - began < 10
    assert trials._process is None


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="only Linux tells")
def test_the_memory_it_takes_is_limited(trials):
    trials.run(GOOD, True, VOCABULARY)
    limits = Path(f"/proc/{trials._process.pid}/limits").read_text().splitlines()
    [line] = [line for line in limits if line.startswith("Max address space")]
    assert line.split()[3] == str(trial.MEMORY_BYTES)


def test_who_waits_too_long_is_asked_to_come_again(trials, monkeypatch):
    monkeypatch.setattr(isolation, "WAIT_LIMIT_S", 0.05)
    with trials._lock, pytest.raises(QueueFullError, match="try again later"):
        trials.run(GOOD, True, VOCABULARY)


def test_it_ends_with_its_owner():
    trials = Trials()
    trials.run(GOOD, True, VOCABULARY)
    process, gone = trials._process, weakref.ref(trials)
    del trials
    gc.collect()
    assert gone() is None
    assert process.returncode is not None


def test_it_ends_with_the_process_that_it_is_for(trials):
    trials.run(GOOD, True, VOCABULARY)
    process = trials._process
    process.stdin.close()  # as when the other end is gone
    assert process.wait(10) == 0
    trials.close()


def test_a_large_stack_passes_results_and_errors_on():
    assert trial.on_a_large_stack(lambda: 7, 1 << 20) == 7

    def fails():
        raise KeyError("x")

    with pytest.raises(KeyError):
        trial.on_a_large_stack(fails, 1 << 20)

    def deep(depth):
        return sorted([depth], key=lambda d: deep(d - 1) if d else 0)

    assert trial.on_a_large_stack(lambda: deep(100), 16 << 20) == [100]
