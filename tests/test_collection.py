"""Loading is not slowed by collections, and what it made is looked at once."""

import gc

import pytest

from jaxinfer import async_engine
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.collection import paused_collection
from jaxinfer.config import EngineConfig


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_loading_and_then_what_was_before(was_enabled):
    before = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        assert paused_collection()(gc.isenabled)() is False
        assert gc.isenabled() == was_enabled
        with pytest.raises(ValueError, match="invalid literal"):
            paused_collection()(int)("not a number")
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_what_loading_made_is_collected_once(monkeypatch):
    seen = []

    def load(_):
        return [[] for _ in range(100_000)]

    def on_collection(phase, info):
        if phase == "start":
            seen.append(info["generation"])

    monkeypatch.setattr(async_engine, "load_engine", load)
    monkeypatch.setattr(AsyncEngine, "_start", lambda *_: seen.append("ready"))
    gc.callbacks.append(on_collection)
    try:
        AsyncEngine(EngineConfig()).load()
    finally:
        gc.callbacks.remove(on_collection)
        frozen = gc.get_freeze_count()
        gc.unfreeze()
    assert seen[:2] == [2, "ready"]
    assert frozen > 100_000
