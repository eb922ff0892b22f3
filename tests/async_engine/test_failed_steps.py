"""Steps that fail, and what is left when the engine dies of one."""

import asyncio

import jax
import pytest
from async_engine.clients import fold, request, until

from jaxinfer.async_engine import EngineDeadError
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import SamplingParams


def die(engine, loaded, monkeypatch):
    def fail():
        raise ArithmeticError("injected")

    monkeypatch.setattr(loaded.engine, "start_step", fail)


async def test_a_fault_in_a_step_ends_every_open_request(engine, loaded, gate, monkeypatch, caplog):
    requests = [request(f"r{i}", n=1 + i, max_tokens=50) for i in range(3)]
    ends = [[] for _ in requests]

    async def watch(one, end):
        async for delta in engine.generate(one):
            end.append((delta.index, delta.finish_reason, delta.error))

    tasks = [asyncio.create_task(watch(*pair)) for pair in zip(requests, ends, strict=True)]
    await asyncio.sleep(0.02)
    die(engine, loaded, monkeypatch)
    gate.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    for number, end in enumerate(ends):
        last = [one for one in end if one[1] is not None]
        assert last == [(index, "error", "the engine stopped") for index in range(number + 1)]
    assert engine.state == "dead"
    assert "injected" in caplog.text
    with pytest.raises(EngineDeadError, match="dead"):
        engine.submit(request(), print)
    with pytest.raises(EngineDeadError):
        await anext(engine.generate(request()))


def test_only_the_open_completions_get_the_error(engine, loaded, monkeypatch):
    # The first completion ends at a stop id that the second, with another seed, has not met.
    steps = iter(range(1000))
    step = loaded.engine.start_step
    seen = []

    def fail_later():
        if any(delta.finish_reason for delta in seen):
            raise ArithmeticError
        assert next(steps) < 500
        return step()

    monkeypatch.setattr(loaded.engine, "start_step", fail_later)
    params = SamplingParams(n=2, seed=3, max_tokens=100, stop_token_ids=tuple(range(10)))
    engine.submit(EngineRequest("r", (1, 2), params), seen.extend)
    until(lambda: engine.state == "dead" and sum(d.finish_reason is not None for d in seen) == 2)
    first, second = (delta for delta in seen if delta.finish_reason is not None)
    assert {first.index, second.index} == {0, 1}
    assert (first.finish_reason, second.finish_reason) == ("stop", "error")


def test_a_dead_engine_fails_what_it_never_looked_at(engine, loaded, gate, monkeypatch):
    arrived = []
    engine.submit(request("running", max_tokens=50), arrived.extend)
    until(lambda: engine.stats().num_waiting)
    die(engine, loaded, monkeypatch)
    engine.submit(request("behind"), arrived.extend)
    gate.set()
    until(lambda: engine.state == "dead")
    until(lambda: {delta.request_id for delta in arrived} == {"running", "behind"})


def test_threads_that_stream_learn_of_the_death(engine, loaded, monkeypatch):
    die(engine, loaded, monkeypatch)
    with pytest.raises(EngineDeadError, match="stopped"):
        list(engine.stream([request()]))


class TestFailedSteps:
    def fail(self, loaded, monkeypatch, numbers):
        """Steps with these numbers fail and take the device state with them."""
        runner, dispatch = loaded.engine.runner, loaded.engine.runner.dispatch
        steps = iter(range(10_000))

        def faulty(*step):
            if next(steps) in numbers:
                for leaf in jax.tree.leaves(runner._state):
                    leaf.delete()
                raise ArithmeticError("injected")
            return dispatch(*step)

        monkeypatch.setattr(runner, "dispatch", faulty)

    async def test_clients_notice_nothing_of_one(self, engine, loaded, monkeypatch):
        requests = [request(f"r{i}", (i, 9, 4 * i), 20) for i in range(4)]
        expected = await asyncio.gather(*(fold(engine, one) for one in requests))
        self.fail(loaded, monkeypatch, {3, 11})
        assert await asyncio.gather(*(fold(engine, one) for one in requests)) == expected
        assert engine.state == "ready"
        assert engine.stats().failed_steps >= 2
        assert engine.stats().num_compilations_after_warmup == 0

    async def test_a_rebuild_that_fails_kills_the_engine(self, engine, loaded, monkeypatch, caplog):
        def no_room():
            raise MemoryError("no room for the pool")

        with monkeypatch.context() as patch:
            patch.setattr(loaded.engine.runner, "reset_device", no_room)
            self.fail(loaded, patch, {4})
            deltas = [delta async for delta in engine.generate(request(max_tokens=50))]
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "the engine stopped")
        assert 0 < sum(len(delta.token_ids) for delta in deltas) < 50
        assert engine.state == "dead"
        assert not engine.is_hung
        assert "no room for the pool" in caplog.text
        engine._thread.join(5)
        loaded.engine.runner.reset_device()
