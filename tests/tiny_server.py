"""The application in front of a tiny engine, in this process."""

import asyncio
import contextlib

from aiohttp import web
from serve_process import ServeProcess
from tiny_engine import MAX_OPEN, empty, shared

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.server.app import make_app


class TinyServer(ServeProcess):
    """Asked as if it were a process of its own."""

    def __init__(self, url):
        self.url = url


@contextlib.asynccontextmanager
async def tiny_server(monkeypatch, **settings):
    """Yields a TinyServer that is ready; nothing of its engine may be in use afterwards."""
    loaded = shared()
    monkeypatch.setattr("jaxinfer.async_engine.load_engine", lambda config: loaded)
    engine = AsyncEngine(EngineConfig(max_queued_requests=MAX_OPEN))
    app = make_app(engine, ServerConfig(**settings))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with asyncio.timeout(30):
            while engine.state != "ready":
                await asyncio.sleep(0.01)
        yield TinyServer(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    empty(loaded.engine)
