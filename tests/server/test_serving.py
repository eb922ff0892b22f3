"""The process around the application: readiness, signals, draining, exit codes."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess

import aiohttp
import pytest
from serve_process import free_port
from server.fake_engine import FakeAsyncEngine, Server, chat, until

from jaxinfer.config import ServerConfig
from jaxinfer.server import serving
from jaxinfer.server.app import make_app
from jaxinfer.server.served_model import Models, ServedModel
from jaxinfer.server.state import LIFECYCLE

CHAT = "/v1/chat/completions"


@pytest.fixture
async def process(engine):
    """Returns a function that starts `serving.run` and returns (its task, a Server)."""
    sessions = []

    async def go(models=None, **settings):
        config = ServerConfig(port=free_port(), **settings)
        app = make_app(models or engine, config)
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


class TestTwoModels:
    @pytest.fixture
    async def other(self):
        return FakeAsyncEngine(name="other")

    @pytest.fixture
    async def models(self, engine, other):
        return Models([ServedModel(engine), ServedModel(other)])

    async def test_the_log_names_them(self, process, models, caplog):
        caplog.set_level("INFO", "jaxinfer")
        task, _ = await process(models)
        await until(lambda: "ready: tiny, other" in caplog.text)
        stop()
        assert await task == 0

    async def test_one_dead_engine_ends_the_process(self, process, models, engine, other):
        task, server = await process(models)
        await until(lambda: server.app[LIFECYCLE].is_ready)
        engine.gate.clear()
        whole = asyncio.create_task(server.post(CHAT, chat()))
        await until(lambda: engine.running)
        other.state = "dead"
        assert (await server.get("/health/live"))[0] == 503
        assert (await server.post(CHAT, chat()))[0] == 503
        engine.gate.set()
        assert (await whole)[0] == 200
        async with asyncio.timeout(3):
            assert await task == 1
        assert engine.state == "dead"

    async def test_one_that_cannot_be_loaded_ends_it_too(self, process, models, other, capsys):
        other.load_error = ValueError("other.gguf: bad magic")
        task, _ = await process(models)
        async with asyncio.timeout(3):
            assert await task == 1
        assert "other.gguf: bad magic" in capsys.readouterr().err

    async def test_a_signal_drains_both(self, process, models, engine, other):
        task, server = await process(models, shutdown_timeout=5.0)
        await until(lambda: server.app[LIFECYCLE].is_ready)
        for each in (engine, other):
            each.gate.clear()
        asked = [asyncio.create_task(server.post(CHAT, chat(model=m))) for m in ("tiny", "other")]
        await until(lambda: engine.running and other.running)
        stop()
        await until(lambda: server.app[LIFECYCLE].is_draining)
        for each in (engine, other):
            each.gate.set()
        assert [reply[0] for reply in await asyncio.gather(*asked)] == [200, 200]
        assert await task == 0

    async def test_a_signal_while_the_second_loads(self, process, models, other, monkeypatch):
        codes = []
        monkeypatch.setattr(serving.os, "_exit", codes.append)
        other.loaded_event.clear()
        task, server = await process(models)
        assert (await server.post(CHAT, chat()))[0] == 200
        stop()
        async with asyncio.timeout(3):
            await task
        assert codes == [0]


class TestAddresses:
    async def test_a_port_for_metrics(self, process):
        metrics_port = free_port()
        task, server = await process(
            metrics_port=metrics_port, api_key=("k",), protect_metrics=True
        )
        url = f"http://127.0.0.1:{metrics_port}"
        async with server.session.get(f"{url}/metrics") as response:
            assert response.status == 401
        key = {"Authorization": "Bearer k"}
        async with server.session.get(f"{url}/metrics", headers=key) as response:
            assert response.status == 200
            assert "vllm:num_requests_running" in await response.text()
        async with server.session.get(f"{url}/v1/models", headers=key) as response:
            assert (response.status, response.headers["Server"]) == (404, "jaxinfer")
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with server.session.get(f"{server.url}/metrics", headers=key) as response:
            assert 'handler="/metrics"' in await response.text()
        stop()
        assert await task == 0
        with socket.create_server(("127.0.0.1", metrics_port)):
            pass

    async def test_a_taken_metrics_port_frees_the_other(self, engine, capsys):
        port = free_port()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            taken = sock.getsockname()[1]
            config = ServerConfig(port=port, metrics_port=taken)
            assert await serving.run(make_app(engine, config), config) == 2
        assert f"127.0.0.1:{taken}: the port is in use" in capsys.readouterr().err
        with socket.create_server(("127.0.0.1", port)):
            pass

    async def test_a_unix_socket(self, process_at, tmp_path, caplog):
        caplog.set_level("INFO", "jaxinfer")
        path = str(tmp_path / "server.sock")
        task, session = await process_at(aiohttp.UnixConnector(path), uds=path)
        async with session.post(f"http://x{CHAT}", json=chat()) as response:
            assert response.status == 200
        assert f"listening on unix:{path}" in caplog.text
        stop()
        assert await task == 0
        assert not os.path.exists(path)

    async def test_a_socket_nobody_serves_any_more_is_replaced(self, process_at, tmp_path):
        path = str(tmp_path / "server.sock")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
        task, _ = await process_at(aiohttp.UnixConnector(path), uds=path)
        stop()
        assert await task == 0

    async def test_ipv6(self, process_at, caplog):
        caplog.set_level("INFO", "jaxinfer")
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
        port = free_port()
        task, session = await process_at(
            aiohttp.TCPConnector(), f"http://[::1]:{port}", host="::1", port=port
        )
        async with session.post(f"http://[::1]:{port}{CHAT}", json=chat()) as response:
            assert response.status == 200
        assert f"listening on http://[::1]:{port}" in caplog.text
        stop()
        assert await task == 0

    async def test_https(self, process_at, certificate, caplog):
        caplog.set_level("INFO", "jaxinfer")
        port = free_port()
        trust = ssl.create_default_context(cafile=certificate["ssl_certfile"])
        url = f"https://localhost:{port}"
        task, session = await process_at(
            aiohttp.TCPConnector(ssl=trust), url, port=port, **certificate
        )
        async with session.post(url + CHAT, json=chat(stream=True)) as response:
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert f"listening on https://127.0.0.1:{port}" in caplog.text
        stop()
        assert await task == 0
        assert "eof_received" not in caplog.text

    async def test_a_certificate_that_is_none_is_exit_2(self, engine, capsys, tmp_path):
        path = tmp_path / "cert.pem"
        path.write_text("nothing")
        for name in (path, tmp_path / "none.pem"):
            config = ServerConfig(port=free_port(), ssl_certfile=str(name))
            assert await serving.run(make_app(engine, config), config) == 2
            assert f"ssl_certfile '{name}'" in capsys.readouterr().err

    @pytest.fixture
    def certificate(self, tmp_path):
        if shutil.which("openssl") is None:
            pytest.skip("openssl makes the certificate")
        files = {"ssl_keyfile": str(tmp_path / "key"), "ssl_certfile": str(tmp_path / "cert")}
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        command += ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
        subprocess.run(command, check=True, capture_output=True)
        return files

    @pytest.fixture
    async def process_at(self, engine):
        """Returns a function that starts `serving.run` and returns (its task, a session)."""
        async with contextlib.AsyncExitStack() as stack:

            async def go(connector, url="http://x", **settings):
                config = ServerConfig(**{"port": 1, **settings})
                task = asyncio.create_task(serving.run(make_app(engine, config), config))
                session = await stack.enter_async_context(
                    aiohttp.ClientSession(connector=connector)
                )
                async with asyncio.timeout(5):
                    while True:
                        with contextlib.suppress(aiohttp.ClientConnectionError):
                            async with session.get(f"{url}/health") as response:
                                if response.status == 200:
                                    return task, session
                        assert not task.done()
                        await asyncio.sleep(0.01)

            yield go
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
