"""Models of the offline API: which are loaded, what closing frees, what stops a script."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from command import run
from tiny_engine import build, empty, shared

import jaxinfer
from jaxinfer import llm as llm_module
from jaxinfer.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.llm import LLM


def test_a_closed_model_says_so():
    loaded = shared()
    with LLM.from_engine(AsyncEngine.from_loaded(loaded)) as llm:
        assert llm.generate("a", max_tokens=1)
    with pytest.raises(EngineDeadError, match="not loaded"):
        llm.generate("a")
    llm.close()


class TestModuleFunctions:
    @pytest.fixture
    def loads(self, monkeypatch):
        """The options of every load; what is loaded is the tiny engine."""
        loads = []

        def load(self):
            loads.append(self.config)
            self._start(shared())

        monkeypatch.setattr(AsyncEngine, "load", load)
        yield loads
        jaxinfer.unload()
        empty(shared().engine)

    def test_one_model_per_options(self, loads):
        for _ in range(2):
            [output] = jaxinfer.generate("a", max_tokens=2, max_num_seqs=3, progress=False)
            assert len(output.outputs[0].token_ids) <= 2
        assert [config.max_num_seqs for config in loads] == [3]
        jaxinfer.generate("a", max_tokens=1)
        jaxinfer.generate("a", "some/model", max_tokens=1)
        assert [config.model for config in loads] == [None, None, "some/model"]
        assert len(llm_module._models) == 3
        jaxinfer.unload()
        assert not llm_module._models
        jaxinfer.generate("a", max_tokens=1)
        assert len(loads) == 4

    def test_threads_load_a_model_once(self, loads):
        threads = [
            threading.Thread(target=jaxinfer.generate, args=("a",), kwargs={"max_tokens": 1})
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(loads) == 1


@pytest.mark.slow
def test_closing_frees_weights_and_pool():
    llm = LLM.from_engine(AsyncEngine.from_loaded(build()))
    llm.generate("a", max_tokens=2)
    kept = [weakref.ref(llm.engine.loaded.engine), weakref.ref(llm.engine.loaded.engine.runner)]
    kv = weakref.ref(llm.engine.loaded.engine.runner._state.kv[0])
    llm.close()
    assert [reference() for reference in (*kept, kv)] == [None, None, None]
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.real_model
def test_closing_gives_memory_back_to_the_system(smollm2_path):
    """In a process of its own: what other tests hold is in this one's memory."""
    script = f"""
import jaxinfer
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
llm = jaxinfer.LLM({str(smollm2_path)!r}, max_num_seqs=4, max_model_len=512)
llm.generate("The capital of France is", max_tokens=4, temperature=0, progress=False)
loaded = resident()
llm.close()
print(loaded - resident())
"""
    result = run("-c", script)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > smollm2_path.stat().st_size * 0.9


@pytest.mark.slow
@pytest.mark.real_model
def test_ctrl_c_in_a_script_on_the_real_model(smollm2_path):
    """A timer's interrupt, as from a keyboard; the model answers after it as before."""
    script = f"""
import _thread, sys, threading, time
import numpy as np
import jaxinfer
llm = jaxinfer.LLM({str(smollm2_path)!r}, max_num_seqs=4, max_model_len=512,
                   max_num_batched_tokens=64)
ask = lambda: llm.generate("The capital of France is", max_tokens=4, temperature=0)[0]
first = ask().outputs[0].text
ids = np.array(llm.tokenizer.encode("The capital of France is"))
[by_ids] = llm.generate(ids, max_tokens=4, temperature=0)
assert by_ids.outputs[0].text == first
assert by_ids.prompt_token_ids == ids.tolist()
timer = threading.Timer(0.5, _thread.interrupt_main)
timer.start()
began = time.monotonic()
try:
    llm.generate(["Once upon a time"] * 4, max_tokens=500, ignore_eos=True)
    sys.exit("not interrupted")
except KeyboardInterrupt:
    took = time.monotonic() - began
assert took < 5, took
assert ask().outputs[0].text == first
stats = llm.engine.stats()
assert stats.finished["abort"] == 4, stats
assert stats.num_free_pages == stats.num_pages, stats
print(first)
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
