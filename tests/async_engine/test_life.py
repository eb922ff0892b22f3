"""Loading and closing, whoever is waiting meanwhile."""

import gc
import threading
import time
import weakref

import jax
import pytest
from async_engine.clients import request, until
from checkpoint.tiny_directory import write_model
from tiny_engine import build, empty

from jaxinfer import async_engine
from jaxinfer.async_engine import AsyncEngine, EngineDeadError, QueueFullError
from jaxinfer.config import EngineConfig


def test_submitting_while_it_dies_never_hangs(loaded, monkeypatch):
    """Every request either raises at once or gets its end."""
    for _ in range(20):
        engine = AsyncEngine.from_loaded(loaded)
        results = []

        def client(number, engine=engine, results=results):
            try:
                results.append(len(list(engine.stream([request(f"c{number}")]))))
            except (EngineDeadError, QueueFullError) as error:
                results.append(error)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        engine.close()
        for thread in threads:
            thread.join(10)
        assert len(results) == 8
        assert engine.state == "dead"
        empty(loaded.engine)


def test_close_waits_for_running_requests(engine):
    arrived = []
    engine.submit(request(max_tokens=60), arrived.extend)
    engine.close(timeout=10.0)
    assert arrived[-1].finish_reason == "length"
    assert sum(len(delta.token_ids) for delta in arrived) == 60
    assert engine.state == "dead"


def test_close_aborts_what_takes_too_long_and_refuses_meanwhile(engine, loaded, gate):
    arrived = []
    engine.submit(request(max_tokens=60), arrived.extend)
    closing = threading.Thread(target=engine.close, args=(0.2,))
    closing.start()
    until(lambda: engine.state == "draining")
    with pytest.raises(EngineDeadError, match="draining"):
        engine.submit(request("late"), print)
    time.sleep(0.3)
    gate.set()
    closing.join(5)
    assert not closing.is_alive()
    assert arrived[-1].finish_reason == "abort"
    assert sum(len(delta.token_ids) for delta in arrived) < 60


def test_closing_twice_and_from_two_threads(engine):
    threads = [threading.Thread(target=engine.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    engine.close()
    with pytest.raises(EngineDeadError, match="not loaded"):
        engine.tokenizer  # noqa: B018


def test_closing_while_it_loads_leaves_no_thread_behind(loaded, monkeypatch):
    loading, go_on = threading.Event(), threading.Event()

    def load_slowly(config):
        loading.set()
        assert go_on.wait(5)
        return loaded

    monkeypatch.setattr(async_engine, "load_engine", load_slowly)
    engine = AsyncEngine(EngineConfig())
    errors = []

    def load():
        try:
            engine.load()
        except EngineDeadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    assert loading.wait(5)
    engine.close(timeout=5.0)
    assert engine.state == "dead"
    go_on.set()
    thread.join(60)  # a collection of all that earlier tests left may come in between
    assert errors == ["the engine was closed while it was loading"]
    assert engine.state == "dead"
    assert engine._thread is None


def test_a_failed_load_is_dead(monkeypatch):
    def fail(config):
        raise ValueError("bad file")

    monkeypatch.setattr(async_engine, "load_engine", fail)
    engine = AsyncEngine(EngineConfig())
    with pytest.raises(ValueError, match="bad file"):
        engine.load()
    assert engine.state == "dead"
    with pytest.raises(EngineDeadError):
        engine.stats()


@pytest.mark.slow
def test_freed_engines_leave_nothing_behind(monkeypatch):
    """Not even those that are given up while start-up still moves their weights."""

    monkeypatch.setattr(
        "jaxinfer.runner.host_memory.use_huge_pages", lambda buffers: time.sleep(0.5)
    )
    left, counts = [], []
    for _ in range(3):
        engine = AsyncEngine.from_loaded(build())
        runner = weakref.ref(engine.loaded.engine.runner)
        engine.close()
        engine.free()
        assert runner() is None
        gc.unfreeze()
        left.append(sum(array.nbytes for array in jax.live_arrays()))
        counts.append(len(gc.get_objects()))
    assert left == left[:1] * 3
    # Caches of jax keep a little of what was traced for each; an engine has many thousands.
    assert counts[-1] - counts[1] < 2 * 1000, counts


@pytest.mark.slow
def test_loading_the_same_model_again_leaves_next_to_nothing(tmp_path):
    """What jax keeps of traced functions is found again, and it has one listener of ours."""
    path = str(write_model(tmp_path / "model"))
    counts = []
    for _ in range(5):
        engine = AsyncEngine(EngineConfig(model=path, max_num_seqs=2, num_pages=16))
        engine.load()
        engine.close()
        engine.free()
        gc.unfreeze()
        counts.append(len(gc.get_objects()))
    # 40 for each load; 150 where every parameter is traced anew.
    assert counts[-1] - counts[2] < 2 * 100, counts
