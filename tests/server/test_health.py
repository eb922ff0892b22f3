"""Health under all the names that probes know, and the check that generates."""

import asyncio

import pytest
from server.fake_engine import chat, until

from jaxinfer.async_engine import QueueFullError
from jaxinfer.server import deep_check
from jaxinfer.server.state import DEEP_CHECK

READY = ["/health", "/ready", "/readyz", "/health/ready", "/ping"]
LIVE = ["/health/live", "/healthz", "/livez"]
CHAT = "/v1/chat/completions"


async def statuses(server, paths, method="GET"):
    found = []
    for path in paths:
        async with server.session.request(method, server.url + path) as response:
            body = await response.read()
            assert bool(body) == (method == "GET")
            found.append(response.status)
    return found


async def test_all_names_by_get_and_head_and_without_a_key(start, engine):
    engine.loaded_event.clear()
    server = await start(wait=False, api_key=("k",))
    for method in ("GET", "HEAD"):
        assert set(await statuses(server, READY, method)) == {503}
        assert set(await statuses(server, LIVE, method)) == {200}
    engine.loaded_event.set()
    await until(lambda: engine.state == "ready")
    for method in ("GET", "HEAD"):
        assert set(await statuses(server, READY + LIVE, method)) == {200}
    engine.state = "dead"
    for method in ("GET", "HEAD"):
        assert set(await statuses(server, READY + LIVE, method)) == {503}


class TestDeepCheck:
    async def test_a_token_is_generated(self, server, engine):
        assert await statuses(server, ["/health_generate"]) == [200]
        [request] = engine.requests
        assert request.params.max_tokens == 1
        assert not engine.running

    async def test_at_most_once_a_second(self, server, engine, monkeypatch):
        checks = [statuses(server, ["/health_generate"]) for _ in range(20)]
        assert await asyncio.gather(*checks) == [[200]] * 20
        assert len(engine.requests) == 1
        monkeypatch.setattr(deep_check, "_INTERVAL_S", 0.0)
        server.app[DEEP_CHECK]._due_at = 0.0
        assert await statuses(server, ["/health_generate"] * 2) == [200, 200]
        assert len(engine.requests) == 3

    async def test_an_engine_that_generates_nothing(self, server, engine, monkeypatch):
        monkeypatch.setattr(deep_check, "_TIMEOUT_S", 0.1)
        engine.gate.clear()
        status, body, headers = await server.get("/health_generate")
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert int(headers["Retry-After"]) > 0
        assert not engine.running, "it was aborted"
        assert (await server.get("/health"))[0] == 200

    @pytest.mark.parametrize(
        ("fault", "status"), [("error", 503), (QueueFullError("full"), 429)], ids=["error", "full"]
    )
    async def test_faults(self, server, engine, fault, status):
        engine.fault = fault
        assert (await server.get("/health_generate"))[0] == status
        # The same answer for a second.
        engine.fault = None
        assert (await server.get("/health_generate"))[0] == status

    async def test_it_is_as_guarded_as_other_work(self, start):
        server = await start(api_key=("k",))
        assert (await server.get("/health_generate"))[0] == 401

    async def test_not_while_loading(self, start, engine):
        engine.loaded_event.clear()
        server = await start(wait=False)
        assert (await server.get("/health_generate"))[0] == 503
        assert (await server.post(CHAT, chat()))[0] == 503
