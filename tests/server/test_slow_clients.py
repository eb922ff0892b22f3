"""Clients that send or read slowly, or stop: they hold up nobody, and not for ever."""

import asyncio
import json
import socket
import time

import pytest
from server.fake_engine import chat, until

from jaxinfer.server import json_body
from jaxinfer.server.state import LIFECYCLE

CHAT = "/v1/chat/completions"
MANY = 100


async def open_raw(server, data):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def assert_others_are_served(server):
    """A request and a health check, at the pace of an idle server."""
    began = time.monotonic()
    assert (await server.post(CHAT, chat()))[0] == 200
    assert (await server.get("/health"))[0] == 200
    assert time.monotonic() - began < 1.0


def head(length):
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()


async def close(connections):
    for _, writer in connections:
        writer.close()
    for _, writer in connections:
        await writer.wait_closed()


async def test_heads_that_do_not_end_are_closed(start):
    server = await start(options={"keepalive_timeout": 0.5})
    starts = (b"", b"P", b"POST ", head(9)[:-2], head(9)[:-2] + b"X-Long: " + b"a" * 4000)
    connections = [await open_raw(server, starts[n % len(starts)]) for n in range(MANY)]
    await assert_others_are_served(server)
    async with asyncio.timeout(5):
        for reader, _ in connections:
            assert await reader.read() == b""
    await close(connections)


async def test_bodies_that_do_not_come_are_a_408(start, engine, monkeypatch):
    monkeypatch.setattr(json_body, "READ_TIMEOUT_S", 0.5)
    server = await start(options={"lingering_time": 0.2})
    sent = json.dumps(chat()).encode()
    connections = [await open_raw(server, head(len(sent) + 1) + sent) for _ in range(MANY)]
    await assert_others_are_served(server)
    async with asyncio.timeout(5):
        for reader, _ in connections:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"Connection: close" in answer
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_timeout"
    assert len(engine.requests) == 1
    await close(connections)


async def test_a_body_that_drips_is_a_408_too(start, monkeypatch):
    monkeypatch.setattr(json_body, "READ_TIMEOUT_S", 0.5)
    server = await start()
    reader, writer = await open_raw(server, head(1000))
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        writer.write(b" ")
        await asyncio.sleep(0.02)
    assert b" 408 " in await answer
    await close([(reader, writer)])


@pytest.fixture
async def deaf(server, engine):
    """Clients that asked for long streams with small buffers, and read nothing."""
    engine.text = "0123456789"
    loop = asyncio.get_running_loop()
    # What a connection inherits: otherwise the system takes all that is said here.
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sockets = []
    body = json.dumps(chat(stream=True, ignore_eos=True, max_tokens=200, n=4)).encode()
    for _ in range(8):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        await loop.sock_sendall(sock, head(len(body)) + body)
        sockets.append(sock)
    await until(lambda: len(engine.requests) == len(sockets))
    yield sockets
    for sock in sockets:
        sock.close()


async def test_who_does_not_read_holds_nobody_up(server, engine, deaf):
    engine.text = "hello"
    await assert_others_are_served(server)
    # The engine is done with them: what they have not read waits in the server.
    await until(lambda: not engine.running, 10.0)
    assert engine.finished == {"length": 4 * len(deaf), "stop": 1}
    assert server.app[LIFECYCLE].num_running == len(deaf)
    # And it is all there for who reads after all.
    [sock, *_] = deaf
    loop = asyncio.get_running_loop()
    received = b""
    async with asyncio.timeout(5):
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += await loop.sock_recv(sock, 65536)
    assert received.count(b'"content":"') == 4 * 201


async def test_who_does_not_read_does_not_keep_the_server_from_ending(server, engine, deaf):
    await until(lambda: not engine.running, 10.0)
    assert server.app[LIFECYCLE].num_running == len(deaf)
    began = time.monotonic()
    await server.app[LIFECYCLE].drain(0.2)
    assert time.monotonic() - began < 2.0
    assert server.app[LIFECYCLE].num_running == 0
