"""An engine thread around the tiny engine that tests share."""

import threading

import pytest
from tiny_engine import empty, shared

from jaxinfer.async_engine import AsyncEngine


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
