"""A client that goes away ends its generation; one that only stops sending does not."""

import asyncio
import json
import random
import socket
import struct
import time

import pytest
from server.fake_engine import chat, until
from tiny_engine import shared
from tiny_server import tiny_server

from jaxinfer.server.json_body import read_body

COMPLETIONS = "/v1/completions"

REQUESTS = {
    "whole": chat(),
    "stream": chat(stream=True),
    "four": chat(n=4),
    "four streamed": chat(n=4, stream=True),
    "scoring": {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1},
    "batch": {"prompt": ["a", "b", "c"]},
}


def close(writer):
    writer.close()


def reset(writer):
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("name", REQUESTS)
async def test_leaving_before_the_first_token_aborts(server, engine, name, leave):
    body = REQUESTS[name]
    engine.gate.clear()
    path = COMPLETIONS if "prompt" in body else "/v1/chat/completions"
    _, writer = await server.raw(body, path)
    await until(lambda: engine.running)
    count = len(engine.running)
    leave(writer)
    await until(lambda: not engine.running, timeout_s=1.0)
    assert len(engine.aborted) == count


@pytest.mark.parametrize("leave", [close, reset])
async def test_leaving_in_the_middle_of_a_stream_aborts(server, engine, leave, monkeypatch):
    monkeypatch.setattr("jaxinfer.server.replies.PATIENCE_S", 0.1)
    engine.text = "x" * 100
    reader, writer = await server.raw(chat(stream=True))
    await reader.readuntil(b'"content":"x"')
    engine.gate.clear()
    leave(writer)
    await until(lambda: engine.aborted, timeout_s=1.0)
    assert not engine.running


@pytest.mark.parametrize("stream", [False, True])
async def test_half_closing_cancels_nothing(server, engine, stream):
    engine.gate.clear()
    reader, writer = await server.raw(chat(stream=stream))
    writer.write_eof()
    await until(lambda: engine.running)
    await asyncio.sleep(0.6)
    assert engine.running
    engine.gate.set()
    reply = await reader.read()
    while reply.startswith(b"HTTP/1.1 102 "):
        reply = reply.partition(b"\r\n\r\n")[2]
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"[DONE]" in reply if stream else b'"hello"' in reply
    assert reply.count(b"HTTP/1.1") == 1
    assert not engine.aborted
    writer.close()


async def test_http_1_0_gets_no_interim_response(server, engine):
    engine.gate.clear()
    reader, writer = await server.raw(chat(), version="1.0")
    writer.write_eof()
    await until(lambda: engine.running)
    await asyncio.sleep(0.3)
    engine.gate.set()
    assert (await reader.read()).startswith(b"HTTP/1.0 200")
    writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_closing_long_before_the_handler_cancels_nothing(start, version, monkeypatch):
    async def slow(*args):
        await asyncio.sleep(0.4)  # as on a machine with other work
        return await read_body(*args)

    monkeypatch.setattr("jaxinfer.server.routing.read_body", slow)
    server = await start()
    reader, writer = await server.raw(chat(), version=version)
    writer.write_eof()
    async with asyncio.timeout(5):
        reply = await reader.read()
    assert b"200 OK" in reply
    assert b'"hello"' in reply
    writer.close()


async def test_half_closing_after_two_requests_gets_two_answers(server):
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(2 * head)
    writer.write_eof()
    async with asyncio.timeout(5):
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 2
    writer.close()


async def test_closing_an_idle_connection_frees_it(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write_eof()
    async with asyncio.timeout(1):
        assert await reader.read() == b""
    writer.close()


async def test_closing_inside_a_body_frees_the_connection(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    writer.write_eof()
    async with asyncio.timeout(1):
        assert b"200" not in await reader.read()
    writer.close()


async def test_an_aborted_request_is_logged_without_a_traceback(server, engine, caplog):
    engine.gate.clear()
    caplog.set_level("INFO")
    _, writer = await server.raw(chat())
    await until(lambda: engine.running)
    reset(writer)
    await until(lambda: "499" in caplog.text)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


LONG = {"prompt": "x" * 60, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
KINDS = {
    "whole": LONG,
    "stream": {**LONG, "stream": True},
    "three streamed": {**LONG, "n": 3, "stream": True},
    "batch": {**LONG, "prompt": ["x" * 30, "y" * 60], "max_tokens": 40},
    "scoring": {**LONG, "echo": True, "logprobs": 2, "max_tokens": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("name", KINDS)
async def test_leaving_at_any_moment_frees_the_pages_within_a_second(monkeypatch, name, leave):
    draw = random.Random(name)
    data = json.dumps(KINDS[name]).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    async with tiny_server(monkeypatch) as server:
        stats = shared().engine.stats
        port = int(server.url.rsplit(":", 1)[1])
        used = []

        async def ask(seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + data)
            if seconds is None:
                assert await reader.read(12) == b"HTTP/1.1 200"
                writer.write_eof()
                await reader.read()
            else:
                await asyncio.sleep(seconds)
            used.append(stats().num_pages - stats().num_free_pages)
            leave(writer)
            await until(lambda: stats().num_running + stats().num_waiting == 0, timeout_s=1.0)
            await until(lambda: stats().num_free_pages == stats().num_pages, timeout_s=1.0)

        began = time.monotonic()
        await ask(None)
        whole_s = time.monotonic() - began
        for moment in [0.0, *(draw.uniform(0, whole_s) for _ in range(9))]:
            await ask(moment)
        assert max(used) > 0 or name == "scoring"
