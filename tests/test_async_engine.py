"""The engine thread: who gets what, and what is left when clients, loops or the engine go."""

import asyncio
import functools
import threading
import time
from contextlib import aclosing

import jax
import pytest
from tiny_engine import EOS, MAX_OPEN, empty, shared

from jaxinfer import async_engine
from jaxinfer.async_engine import AsyncEngine, EngineDeadError, QueueFullError
from jaxinfer.config import EngineConfig
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import EngineRequest
from jaxinfer.sampling_params import InvalidParameter, SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def request(request_id="r", prompt=(1, 2, 3), max_tokens=5, **settings):
    return EngineRequest(
        request_id, prompt, SamplingParams(max_tokens=max_tokens, **GREEDY, **settings)
    )


@pytest.fixture
def loaded():
    loaded = shared()
    yield loaded
    empty(loaded.engine)


@pytest.fixture
def engine(loaded):
    engine = AsyncEngine.from_loaded(loaded)
    yield engine
    engine.close()


@pytest.fixture
def gate(loaded, monkeypatch):
    """While clear, steps wait; set at the end of a test."""
    gate = threading.Event()
    step = loaded.engine.start_step

    def gated_step():
        assert gate.wait(10)
        return step()

    monkeypatch.setattr(loaded.engine, "start_step", gated_step)
    yield gate
    gate.set()


async def fold(engine, request):
    output = RequestOutput.empty(
        request.request_id, None, request.prompt_token_ids, request.params.n
    )
    async for delta in engine.generate(request):
        output.extend(delta)
    return [completion.token_ids for completion in output.outputs]


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


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
    deliver = functools.partial(async_engine._post, loop, asyncio.Queue())
    engine.submit(request("gone", max_tokens=100), deliver)
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
    thread.join(5)
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

    def test_room_comes_back(self, engine):
        for _ in range(3):
            requests = [request(f"r{i}") for i in range(MAX_OPEN)]
            assert len(list(engine.stream(requests))) >= len(requests)


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


class TestFailedSteps:
    def fail(self, loaded, monkeypatch, numbers):
        """Steps with these numbers fail and take the device state with them."""
        runner, dispatch = loaded.engine.runner, loaded.engine.runner.dispatch
        steps = iter(range(10_000))

        def faulty(plan, wants_top):
            if next(steps) in numbers:
                for leaf in jax.tree.leaves(runner._state):
                    leaf.delete()
                raise ArithmeticError("injected")
            return dispatch(plan, wants_top)

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
