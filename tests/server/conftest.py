"""A real socket in front of the fake engine."""

import contextlib

import aiohttp
import openai
import pytest
from aiohttp import web
from server.fake_engine import FakeAsyncEngine, Server, until

from jaxinfer.config import ServerConfig
from jaxinfer.server.app import make_app
from jaxinfer.server.connection import accept, listen
from jaxinfer.server.state import LIFECYCLE


@pytest.fixture
async def engine():
    return FakeAsyncEngine()


@pytest.fixture
async def start(engine):
    """Returns a function that starts a server with some settings.

    It is in front of `engine` if it is not given other models.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def go(wait=True, models=None, options=None, **settings):
            app = make_app(models or engine, ServerConfig(**settings))
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            options = {"access_log": None, **(options or {})}
            listener = await listen(runner, "127.0.0.1", 0, **options)
            await runner.setup()
            await accept(listener)
            stack.push_async_callback(runner.cleanup)
            stack.callback(listener.close)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            if wait:
                await until(lambda: not app[LIFECYCLE].is_starting)
            server = Server(app, listener.sockets[0].getsockname()[1], session)
            server.listener = listener.sockets[0]
            return server

        yield go


@pytest.fixture
async def server(start):
    return await start()


@pytest.fixture
async def client(server):
    """OpenAI's own Python client of `server`."""
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="EMPTY", max_retries=0
    ) as client:
        yield client
