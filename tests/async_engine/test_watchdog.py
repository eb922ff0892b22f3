"""Steps that never end."""

import asyncio
import threading
import time

import pytest
from async_engine.clients import fold, request, until

from jaxinfer.async_engine import AsyncEngine, EngineDeadError
from jaxinfer.config import EngineConfig


class TestHungSteps:
    @pytest.fixture
    def make(self, loaded):
        """Returns an engine whose steps may take some time; its thread has ended afterwards."""
        engines = []

        def make(step_timeout):
            engines.append(AsyncEngine.from_loaded(loaded, EngineConfig(step_timeout=step_timeout)))
            return engines[-1]

        yield make
        for engine in engines:
            engine.close()
            engine._thread.join(10)
            assert not engine._thread.is_alive()

    @pytest.fixture
    def gate(self, loaded, monkeypatch):
        """The fourth step hangs until it is set; `reached` says that it does."""
        gate, steps, step = threading.Event(), iter(range(10_000)), loaded.engine.start_step
        gate.reached = threading.Event()

        def hanging():
            if next(steps) == 3:
                gate.reached.set()
                assert gate.wait(20)
            step()

        monkeypatch.setattr(loaded.engine, "start_step", hanging)
        yield gate
        gate.set()

    def test_everyone_is_told_and_nobody_is_served_any_more(self, make, gate, caplog):
        engine = make(0.2)
        batches = []
        for number in range(2):
            engine.submit(request(f"r{number}", max_tokens=50, n=2), batches.append)
        until(lambda: engine.state == "dead", 10)
        assert engine.is_hung
        ends = {}
        until(lambda: sum(d.finish_reason is not None for b in list(batches) for d in b) == 4)
        for delta in (delta for batch in batches for delta in batch):
            if delta.finish_reason is not None:
                ends[delta.request_id, delta.index] = (delta.finish_reason, delta.error)
        assert len(ends) == 4
        assert set(ends.values()) == {("error", "a step did not end within 0.2 s")}
        with pytest.raises(EngineDeadError, match="dead"):
            engine.submit(request("late"), print)
        began = time.monotonic()
        engine.close(timeout=30.0)
        assert time.monotonic() - began < 1, "nothing to wait for"
        assert "the engine is given up" in caplog.text
        count = len(batches)
        gate.set()
        engine._thread.join(10)
        assert len(batches) == count, "what a step brings after all is dropped"

    async def test_iterators_and_threads_learn_of_it(self, make, gate):
        engine = make(0.2)
        deltas = [delta async for delta in engine.generate(request(max_tokens=50))]
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["error"]
        with pytest.raises(EngineDeadError):
            list(engine.stream([request()]))

    def test_closing_waits_no_longer_than_the_timeout(self, make, gate):
        engine = make(0.4)
        engine.submit(request(max_tokens=50), print)
        assert gate.reached.wait(5)
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        assert engine.is_hung

    def test_many_steps_and_idle_time_are_no_hang(self, make, loaded, monkeypatch):
        step = loaded.engine.start_step

        def slow():
            time.sleep(0.05)
            step()

        monkeypatch.setattr(loaded.engine, "start_step", slow)
        engine = make(0.6)
        for _ in range(2):
            assert [len(ids) for ids in asyncio.run(fold(engine, request(max_tokens=16)))] == [16]
            time.sleep(0.7)
        assert engine.state == "ready"

    def test_zero_waits_for_ever(self, make, gate):
        engine = make(0.0)
        arrived = []
        engine.submit(request(max_tokens=9), arrived.extend)
        time.sleep(0.5)
        assert engine.state == "ready"
        gate.set()
        until(lambda: arrived and arrived[-1].finish_reason == "length")
