"""Who gets what, and what is left when clients or their loops go."""

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest
from async_engine.clients import fold, request, until
from tiny_engine import EOS, MAX_NUM_SEQS, MAX_OPEN

from jaxinfer.async_engine import AsyncEngine, EngineDeadError, QueueFullError
from jaxinfer.config import EngineConfig
from jaxinfer.delivery import Mailbox
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams


async def test_tasks_together_get_what_each_gets_alone(engine):
    requests = [request(f"r{i}", (i, 7 * i, 100 - i), 3 + i, n=1 + i % 2) for i in range(6)]
    alone = [await fold(engine, one) for one in requests]
    together = await asyncio.gather(*(fold(engine, one) for one in requests))
    assert together == alone
    assert [len(ids[0]) for ids in alone] == [3 + i for i in range(6)]


async def test_who_has_the_last_delta_sees_its_pages_freed(engine):
    for _ in range(5):
        await fold(engine, request())
        stats = engine.stats()
        assert (stats.num_running, stats.num_free_pages) == (0, stats.num_pages)


async def test_closing_the_iterator_aborts(engine):
    async with aclosing(engine.generate(request(max_tokens=100))) as deltas:
        async for _ in deltas:
            break
    until(lambda: engine.stats().num_running == 0)
    assert engine.stats().num_free_pages == engine.stats().num_pages
    assert engine.stats().finished["abort"] >= 1


async def test_cancelling_the_task_aborts(engine, gate):
    task = asyncio.create_task(fold(engine, request(max_tokens=100)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    engine.close(timeout=5.0)
    assert engine.stats().num_free_pages == engine.stats().num_pages


def test_an_abort_right_behind_its_submission_ends_the_request(engine):
    batches = []
    engine.submit(request(max_tokens=100, n=2), batches.append)
    engine.abort("r")
    until(lambda: batches)
    reasons = {delta.index: delta.finish_reason for batch in batches for delta in batch}
    assert reasons == {0: "abort", 1: "abort"}


def test_aborting_what_does_not_exist_does_nothing(engine):
    engine.abort("nobody")
    assert asyncio.run(fold(engine, request())) == asyncio.run(fold(engine, request()))


def test_a_client_whose_loop_is_gone_hurts_nobody(engine, caplog):
    caplog.set_level("INFO")
    loop = asyncio.new_event_loop()
    loop.close()
    # What `generate` submits.
    engine.submit(request("gone", max_tokens=100), Mailbox(loop, asyncio.Queue()))
    assert [len(ids) for ids in asyncio.run(fold(engine, request("stays", max_tokens=20)))] == [20]
    until(lambda: engine.stats().num_running == 0)
    assert engine.stats().num_free_pages == engine.stats().num_pages
    assert "client is gone: Event loop is closed" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_callback_that_fails_loses_only_its_request(engine, caplog):
    def fail(batch):
        raise KeyError("mine")

    engine.submit(request("bad", max_tokens=100), fail)
    assert asyncio.run(fold(engine, request("good")))
    until(lambda: engine.stats().num_running == 0)
    assert "mine" in caplog.text


class TestFullQueue:
    def test_exactly_the_excess_is_refused_at_once(self, engine, gate):
        arrived = []
        for number in range(MAX_OPEN):
            engine.submit(request(f"r{number}"), arrived.extend)
        for number in range(3):
            with pytest.raises(QueueFullError, match=f"the limit is {MAX_OPEN}"):
                engine.submit(request(f"excess{number}"), arrived.extend)
        gate.set()
        until(lambda: sum(delta.finish_reason == "length" for delta in arrived) == MAX_OPEN)

    def test_completions_are_counted_not_requests(self, engine, gate):
        engine.submit(request("a", n=MAX_OPEN - 2), print)
        with pytest.raises(QueueFullError):
            engine.submit(request("b", n=3), print)
        engine.submit(request("b", n=2), print)

    def test_the_engines_own_refusal_reaches_whoever_submitted(self, engine, loaded, monkeypatch):
        def refuse(request):
            raise QueueFullError("5 requests are waiting")

        monkeypatch.setattr(loaded.engine, "add", refuse)
        with pytest.raises(QueueFullError, match="5 requests"):
            asyncio.run(fold(engine, request()))
        with pytest.raises(QueueFullError, match="5 requests"):
            list(engine.stream([request()]))
        assert engine.state == "ready"

    def test_room_can_be_asked_for_before_any_work(self, engine, gate):
        for number in range(MAX_OPEN - 1):
            engine.submit(request(f"r{number}"), print)
        engine.check_room()
        with pytest.raises(QueueFullError, match=f"the limit is {MAX_OPEN}"):
            engine.check_room(2)
        engine.submit(request("last"), print)
        with pytest.raises(QueueFullError):
            engine.check_room()

    def test_prompt_tokens_that_wait_are_counted(self, loaded, gate):
        engine = AsyncEngine.from_loaded(loaded, EngineConfig(max_queued_tokens=10))
        arrived = []
        long = tuple(range(20))
        engine.submit(request("alone", long), arrived.extend)  # whatever its length
        with pytest.raises(QueueFullError, match="20 prompt tokens are waiting; the limit is 10"):
            engine.submit(request("more"), arrived.extend)
        gate.set()
        until(lambda: any(delta.finish_reason for delta in arrived))
        gate.clear()
        for number in range(3):
            engine.submit(request(f"r{number}", (1, 2, 3)), arrived.extend)
        with pytest.raises(QueueFullError, match="9 prompt tokens are waiting"):
            engine.submit(request("excess", (1, 2)), arrived.extend)
        engine.submit(request("fits", (1,)), arrived.extend)
        gate.set()
        engine.close(5.0)

    def test_what_runs_no_longer_waits(self, loaded):
        engine = AsyncEngine.from_loaded(loaded, EngineConfig(max_queued_tokens=3))
        arrived = []
        engine.submit(request("runs", max_tokens=100), arrived.extend)
        until(lambda: arrived)
        engine.submit(request("waits", max_tokens=1), arrived.extend)
        engine.close(5.0)

    def test_the_depth_of_the_queue(self, engine, gate):
        assert engine.queue_depth == 0
        for number in range(MAX_NUM_SEQS + 3):
            engine.submit(request(f"r{number}", max_tokens=40), print)
        assert engine.queue_depth == MAX_NUM_SEQS + 3
        gate.set()
        until(lambda: engine.queue_depth == 3)
        until(lambda: engine.stats().num_running == 0)
        assert engine.queue_depth == 0

    def test_room_comes_back(self, engine):
        for _ in range(3):
            requests = [request(f"r{i}") for i in range(MAX_OPEN)]
            assert len(list(engine.stream(requests))) >= len(requests)


async def test_tokens_of_steps_are_counted(engine):
    before = engine.step_tokens.total
    await asyncio.gather(*(fold(engine, request(f"r{i}", (1,) * 30, 6)) for i in range(3)))
    assert engine.step_tokens.total - before == 3 * (30 + 6)
    bounds, counts = zip(*engine.step_tokens.cumulative(), strict=True)
    assert bounds[:2] + bounds[-1:] == ("1", "8", "+Inf")
    assert list(counts) == sorted(counts)
    assert counts[-1] >= 6


async def test_a_loop_is_woken_once_for_all_that_a_step_made(engine, gate, monkeypatch):
    loop, woken = asyncio.get_running_loop(), []
    wake = loop.call_soon_threadsafe

    def counted(callback, *args):
        woken.append(callback)
        return wake(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    requests = [request(f"r{i}", (i, 3), max_tokens=12) for i in range(MAX_NUM_SEQS)]
    tasks = [asyncio.create_task(fold(engine, one)) for one in requests]
    await asyncio.sleep(0.05)  # all of them are submitted
    steps = engine.stats().steps
    gate.set()
    outputs = await asyncio.gather(*tasks)
    assert [len(ids) for (ids,) in outputs] == [12] * MAX_NUM_SEQS
    assert 0 < len(woken) <= engine.stats().steps - steps


def test_the_queue_is_served_by_priority(engine):
    begun, all_came = [], threading.Event()

    def note(batch):
        begun.extend(d.request_id for d in batch if d.request_id not in begun)

    engine._commands.put(lambda _: all_came.wait(10))
    priorities = {"low": 2, "lower": 3, "high": -1, "middle": 0, "high too": -1, "lowest": 9}
    assert len(priorities) > MAX_NUM_SEQS
    for name, priority in priorities.items():
        engine.submit(replace(request(name, max_tokens=20), priority=priority), note)
    all_came.set()
    until(lambda: len(begun) == len(priorities), 20)
    assert begun == ["high", "high too", "middle", "low", "lower", "lowest"]


async def test_what_the_engine_refuses_raises(engine):
    with pytest.raises(InvalidParameter, match="outside the vocabulary"):
        await fold(engine, request(prompt=(999,)))
    with pytest.raises(InvalidParameter, match="no tokens"):
        list(engine.stream([request(prompt=())]))
    assert await fold(engine, request())


def test_one_id_twice_is_refused(engine, gate):
    engine.submit(request(), print)
    with pytest.raises(ValueError, match="already in flight"):
        engine.submit(request(), print)


async def test_stop_ids_and_eos_are_told_apart(engine):
    async for delta in engine.generate(
        EngineRequest("r", (1, 2), SamplingParams(logit_bias={EOS: 100.0}, temperature=0.0))
    ):
        assert (delta.finish_reason, delta.stop_reason, delta.text) == ("stop", None, "")


def test_clearing_the_prefix_cache_comes_before_later_requests(engine):
    def num_cached():
        deltas = engine.stream([request(prompt=tuple(range(50, 70)))])
        return max(delta.num_cached_tokens for delta in deltas)

    engine.clear_prefix_cache()
    assert [num_cached(), num_cached()] == [0, 16]
    engine.clear_prefix_cache()
    assert num_cached() == 0
    engine.close()
    with pytest.raises(EngineDeadError, match="the engine is dead"):
        engine.clear_prefix_cache()
