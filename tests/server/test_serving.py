"""The process around the application: readiness, signals, draining, exit codes."""

import asyncio
import os
import signal
import socket

import aiohttp
import pytest
from server.fake_engine import Server, chat, until

from jaxinfer.config import ServerConfig
from jaxinfer.server import serving
from jaxinfer.server.app import make_app
from jaxinfer.server.state import LIFECYCLE

CHAT = "/v1/chat/completions"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
async def process(engine):
    """Returns a function that starts `serving.run` and returns (its task, a Server)."""
    sessions = []

    async def go(**settings):
        config = ServerConfig(port=free_port(), **settings)
        app = make_app(engine, config)
        task = asyncio.create_task(serving.run(app, config))
        sessions.append(aiohttp.ClientSession())
        server = Server(app, config.port, sessions[-1])
        while True:
            try:
                await server.get("/health/live")
                break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.01)
        return task, server

    yield go
    for session in sessions:
        await session.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


def stop(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_an_idle_server_exits_0_and_frees_the_port(process, engine, number):
    task, server = await process()
    stop(number)
    async with asyncio.timeout(2):
        assert await task == 0
    assert engine.state == "dead"
    with socket.create_server(("127.0.0.1", server.port)):
        pass


async def test_running_requests_finish_and_new_ones_are_refused(process, engine):
    task, server = await process(shutdown_timeout=5.0)
    engine.gate.clear()
    streamed = asyncio.create_task(server.chunks(CHAT, chat()))
    whole = asyncio.create_task(server.post(CHAT, chat()))
    await until(lambda: len(engine.running) == 2)
    stop()
    await until(lambda: server.app[LIFECYCLE].is_draining)
    status, body, headers = await server.post(CHAT, chat())
    assert (status, headers["Connection"]) == (503, "close")
    assert int(headers["Retry-After"]) > 0
    assert body["error"]["code"] == "unavailable"
    assert (await server.get("/health"))[0] == 503
    assert (await server.get("/health/live"))[0] == 200
    engine.gate.set()
    assert (await streamed)[-1]["choices"][0]["finish_reason"] == "stop"
    assert (await whole)[0] == 200
    async with asyncio.timeout(2):
        assert await task == 0


async def test_what_does_not_finish_in_time_gets_an_error(process, engine):
    task, server = await process(shutdown_timeout=0.1)
    engine.text = "x" * 100
    reader, writer = await server.raw(chat(stream=True))
    await reader.readuntil(b'"content":"x"')
    engine.gate.clear()
    whole = asyncio.create_task(server.post(CHAT, chat()))
    await until(lambda: len(engine.running) == 2)
    stop()
    async with asyncio.timeout(2):
        assert await task == 0
    status, body, _ = await whole
    assert (status, body["error"]["code"]) == (503, "unavailable")
    rest = await reader.read()
    assert b'"code":"unavailable"' in rest
    assert b"[DONE]" not in rest
    writer.close()


async def test_a_second_signal_exits_at_once(process, engine, monkeypatch):
    codes = []
    monkeypatch.setattr(serving.os, "_exit", codes.append)
    task, server = await process(shutdown_timeout=5.0)
    engine.gate.clear()
    request = asyncio.create_task(server.post(CHAT, chat()))
    await until(lambda: engine.running)
    stop()
    await until(lambda: server.app[LIFECYCLE].is_draining)
    stop()
    await until(lambda: codes)
    assert codes == [128 + signal.SIGTERM]
    engine.gate.set()
    await request
    assert await task == 0


async def test_a_signal_while_loading_does_not_wait_for_the_load(process, engine, monkeypatch):
    codes = []
    monkeypatch.setattr(serving.os, "_exit", codes.append)
    engine.loaded_event.clear()
    task, server = await process()
    assert (await server.get("/health"))[0] == 503
    stop()
    async with asyncio.timeout(1):
        await task
    assert codes == [0]


async def test_a_taken_port_is_exit_2_and_one_sentence(engine, capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        config = ServerConfig(port=sock.getsockname()[1])
        assert await serving.run(make_app(engine, config), config) == 2
    message = capsys.readouterr().err
    assert f"127.0.0.1:{config.port}: the port is in use" in message
    assert message.count("\n") == 1


async def test_an_address_that_is_not_ours_is_exit_2(engine, capsys):
    config = ServerConfig(host="no.such.host.invalid", port=1)
    assert await serving.run(make_app(engine, config), config) == 2
    assert "cannot listen on no.such.host.invalid:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(ValueError("model.gguf: bad magic"), False), (KeyError(1), True)]
)
async def test_a_failed_load_is_exit_1(process, engine, capsys, error, has_traceback):
    engine.loaded_event.clear()
    engine.load_error = error
    task, _ = await process()
    engine.loaded_event.set()
    async with asyncio.timeout(2):
        assert await task == 1
    message = capsys.readouterr().err
    assert str(error) in message
    assert ("Traceback" in message) == has_traceback


async def test_a_hung_engine_is_exit_1_though_its_thread_lives(process, engine, monkeypatch):
    codes = []
    monkeypatch.setattr(serving.os, "_exit", codes.append)
    task, server = await process()
    await until(lambda: engine.state == "ready")
    engine.is_hung, engine.state = True, "dead"
    assert (await server.get("/health"))[0] == 503
    async with asyncio.timeout(2):
        await task
    assert codes == [1]


async def test_an_engine_that_does_not_end_its_step_is_not_waited_for(process, engine, monkeypatch):
    codes, ended = [], asyncio.Event()

    async def shutdown(timeout=0.0):
        await ended.wait()

    monkeypatch.setattr(engine, "shutdown", shutdown)
    monkeypatch.setattr(serving.os, "_exit", codes.append)
    monkeypatch.setattr(serving, "_LAST_STEP_S", 0.2)
    task, _ = await process(shutdown_timeout=0.0)
    await until(lambda: engine.state == "ready")
    stop()
    async with asyncio.timeout(2):
        await task
    assert codes == [1]


async def test_a_dead_engine_is_exit_1(process, engine):
    task, _ = await process()
    await until(lambda: engine.state == "ready")
    engine.state = "dead"
    async with asyncio.timeout(2):
        assert await task == 1
