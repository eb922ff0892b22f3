"""A real socket in front of the fake engine."""

import contextlib

import aiohttp
import pytest
from aiohttp import web
from server.fake_engine import FakeAsyncEngine, Server, until

from jaxinfer.config import ServerConfig
from jaxinfer.server.app import make_app
from jaxinfer.server.connection import listen


@pytest.fixture
async def engine():
    return FakeAsyncEngine()


@pytest.fixture
async def start(engine):
    """Returns a function that starts a server in front of `engine` with some settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def go(wait=True, **settings):
            app = make_app(engine, ServerConfig(**settings))
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            listener = await listen(runner, "127.0.0.1", 0, access_log=None)
            await runner.setup()
            await listener.start_serving()
            stack.push_async_callback(runner.cleanup)
            stack.callback(listener.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            if wait:
                await until(lambda: engine.state != "loading")
            return Server(app, listener.sockets[0].getsockname()[1], session)

        yield go


@pytest.fixture
async def server(start):
    return await start()
