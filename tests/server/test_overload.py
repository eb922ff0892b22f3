"""More requests than there is room for, and an end while streams run (C11, C12)."""

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from serve_process import ServeProcess
from server.fake_engine import chat, until

from jaxinfer.sampling_params import InvalidParameter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Asks for health as fast as probes never would, in a process of its own: its clock is not slowed
# down by the thousand clients.
PINGER = """
import http.client, json, select, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=10)
latencies = []
print(flush=True)
while not select.select([sys.stdin], [], [], 0.002)[0]:
    began = time.monotonic()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    latencies.append((began, time.monotonic() - began))
    assert response.status == 200, response.status
print(json.dumps(latencies))
"""


def p99(values):
    return sorted(values)[int(len(values) * 0.99)]


async def test_the_excess_is_refused_while_the_others_wait(server, engine):
    engine.most_running = 30
    engine.gate.clear()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(number):
            body = chat(stream=number % 2 == 0)
            async with session.post(server.url + CHAT, json=body) as response:
                return response.status, response.headers, await response.text()

        asked = [asyncio.create_task(ask(number)) for number in range(300)]
        while sum(task.done() for task in asked) < 270:
            assert (await server.get("/health"))[0] == 200
        assert len(engine.running) == 30
        engine.gate.set()
        replies = await asyncio.gather(*asked)
    assert Counter(status for status, _, _ in replies) == {200: 30, 429: 270}
    for status, headers, text in replies:
        if status == 429:
            assert 1 <= int(headers["Retry-After"]) <= 30
            assert json.loads(text)["error"]["code"] == "queue_full"
    assert not engine.running


async def test_the_excess_is_refused_before_it_is_prepared(server, engine, monkeypatch):
    engine.most_running = 10
    engine.gate.clear()
    tokenized = []
    encode = engine.tokenizer.encode

    def noted(text, **options):
        tokenized.append(text)
        time.sleep(0.005)  # so that the others come meanwhile
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", noted)
    body = {"prompt": "x", "max_tokens": 4}
    asked = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(80)]
    await until(lambda: sum(task.done() for task in asked) == 70)
    engine.gate.set()
    statuses = Counter(status for status, _, _ in await asyncio.gather(*asked))
    assert statuses == {200: 10, 429: 70}
    assert 10 <= len(tokenized) < 30


async def test_a_refusal_costs_no_tokenizing(server, engine, monkeypatch):
    engine.most_running = 0
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: pytest.fail("too early"))
    assert (await server.post(CHAT, chat()))[0] == 429
    assert (await server.post(COMPLETIONS, {"prompt": "x"}))[0] == 429


@pytest.mark.parametrize("echo", [False, True])
async def test_ids_that_never_fit_are_a_400_however_full_it_is(server, engine, echo):
    engine.most_running = 0
    body = {"prompt": [[1], [1] * engine.max_model_len], "echo": echo}
    status, reply, _ = await server.post(COMPLETIONS, body)
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    fits = {"prompt": [1] * (engine.max_model_len - 1)}
    cut = {**body, "truncate_prompt_tokens": -1}
    for body in (fits, cut):
        assert (await server.post(COMPLETIONS, body))[0] == 429


async def test_so_are_those_to_embed(server, engine):
    engine.most_running = 0
    body = {"input": [1, 2]}
    assert (await server.post("/v1/embeddings", body))[0] == 429
    engine.refusal = InvalidParameter("prompt", "too long", "context_length_exceeded")
    assert (await server.post("/v1/embeddings", body))[0] == 400
    assert (await server.post("/v1/embeddings", {"input": "too long to tell"}))[0] == 429


def small_server(*flags):
    return ServeProcess("--max-num-seqs", "4", *flags, script="tests/small_server.py")


def peak_mb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the length of the queue")
async def test_many_connections_may_wait_to_be_accepted(server):
    # Of a socket that listens, Linux tells how many may wait where others tell of lost packets.
    info = server.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert struct.unpack_from("=8x6I", info)[5] == min(1024, most)


async def burst(server):
    """Sends a thousand requests at once; returns the replies, and what /health took meanwhile."""
    pinger = subprocess.Popen(
        [sys.executable, "-c", PINGER, server.url.removeprefix("http://")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number):
            body = {"prompt": f"number {number}", "max_tokens": 32, "ignore_eos": True}
            body["stream"] = number % 2 == 0
            async with session.post(server.url + COMPLETIONS, json=body) as response:
                return response.status, response.headers, await response.text()

        await asyncio.to_thread(pinger.stdout.readline)  # it has begun
        began = time.monotonic()
        replies = await asyncio.gather(*(ask(number) for number in range(1000)))
    asked = json.loads((await asyncio.to_thread(pinger.communicate))[0])
    return replies, [seconds for at, seconds in asked if at + seconds > began]


@pytest.mark.slow
async def test_a_thousand_requests_at_once():
    with small_server("--max-queued-requests", "96") as server:
        before = peak_mb(server.process)
        total = Counter()
        # What else runs on the machine delays some of the answers, and not in every burst.
        for _ in range(3):
            replies, latencies = await burst(server)
            counts = Counter(status for status, _, _ in replies)
            total += counts
            print(counts, f"/health p99 {1e3 * p99(latencies):.1f} ms of {len(latencies)}")
            assert set(counts) == {200, 429}
            assert counts[200] >= 100
            for status, headers, text in replies:
                if status == 429:
                    assert 1 <= int(headers["Retry-After"]) <= 30
                else:
                    assert '"finish_reason":"length"' in text
            if p99(latencies) < 0.1:
                break
        assert p99(latencies) < 0.1
        assert peak_mb(server.process) - before < 100
        metrics = server.metrics()
        assert metrics['vllm:request_success_total{finished_reason="length"}'] == total[200]
        assert metrics['vllm:admission_rejections_total{reason="queue_full"}'] == total[429]
        assert metrics["queue_depth"] == metrics["vllm:num_requests_running"] == 0
        assert metrics["requests_per_second"] > 0
        assert "Traceback" not in server.text


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "may_be_cut"), [("20", False), ("0.01", True)])
async def test_sigterm_with_twenty_streams(timeout_s, may_be_cut):
    with small_server("--shutdown-timeout", timeout_s) as server:

        async def stream(session):
            body = {"prompt": "abc", "max_tokens": 120, "ignore_eos": True, "stream": True}
            async with session.post(server.url + COMPLETIONS, json=body) as response:
                return response.status, await response.text()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            streams = [asyncio.create_task(stream(session)) for _ in range(20)]
            metric = "vllm:num_requests_running"
            await until(lambda: server.metrics()[metric] == 4, 10.0)
            server.process.send_signal(signal.SIGTERM)
            replies = await asyncio.gather(*streams)
        cut = [reply for reply in replies if not reply[1].endswith("data: [DONE]\n\n")]
        for status, text in cut:
            # Those that had not begun are refused, the others have an event more.
            last = text.rstrip("\n").split("\n\n")[-1]
            assert last.startswith("data: ") == (status == 200)
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert {status for status, _ in cut} <= {200, 503}
        assert may_be_cut or not cut
        assert server.process.wait(30) == 0, server.text
        assert "Traceback" not in server.text
