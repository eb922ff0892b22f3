"""What a load test's client sends and records of the answers, on a server of canned ones."""

import asyncio
import contextlib
import re

import pytest
from canned_server import CannedServer

from jaxinfer.load_test.client import LoadClient, Target, first_model, make_session
from jaxinfer.load_test.metrics import Summary
from jaxinfer.load_test.workload import LoadRequest


@pytest.fixture
async def fake():
    async with CannedServer().running() as server:
        yield server


@pytest.fixture
async def client(fake):
    async with make_session("secret") as session:
        done = []
        load = LoadClient(session, Target(fake.url, "fake", 20.0), lambda: done.append(1))
        load.done = done
        yield load


def request_of(first, output_tokens=3):
    return LoadRequest((first, 50, 51), output_tokens)


async def test_latencies_are_those_of_the_server(fake, client):
    fake.first_s, fake.gap_s = 0.08, 0.03
    record = await client.send(request_of(0, 4), 0.0)
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 4, 11)
    assert record.cached_tokens == 3
    assert 0.08 <= record.ttft_s < 2
    assert len(record.itl_s) == 3
    # A late first answer shortens the gap after it.
    assert sum(record.itl_s) >= 0.06
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / 3)
    assert record.e2e_s >= 0.08 + 3 * 0.03
    assert fake.bodies == [
        {
            "model": "fake",
            "prompt": [0, 50, 51],
            "max_tokens": 4,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_without_usage_events_are_counted(client):
    record = await client.send(request_of(8), 0.0)
    assert (record.error, record.output_tokens, record.prompt_tokens) == (None, 3, 3)


async def test_an_open_loop_waits_for_no_answer(fake, client):
    fake.hold = 8  # nothing is answered until all are there
    requests = [request_of(0) for _ in range(8)]
    async with asyncio.timeout(15):
        records = await client.open_loop(requests, [0.02 * index for index in range(8)])
    assert [record.error for record in records] == [None] * 8
    assert fake.most_open == Summary.of(records).peak_in_flight == 8
    assert [record.planned_s for record in records] == [0.02 * index for index in range(8)]
    assert all(record.start_s >= record.planned_s - 1e-3 for record in records)
    assert len(client.done) == 8


async def test_a_closed_loop_keeps_so_many_in_flight(fake, client):
    fake.gap_s = 0.005
    records = await client.closed_loop([request_of(0) for _ in range(9)], 3)
    assert (len(records), fake.most_open) == (9, 3)


async def test_errors_are_counted(fake, client):
    client._target = Target(fake.url, "fake", 1.0)
    requests = [request_of(first) for first in (0, 1, 2, 3, 4, 5, 6, 7, 1)]
    records = await client.closed_loop(requests, 9)
    summary = Summary.of(records)
    assert summary.errors == {
        "429": 2,
        "error event": 1,
        "incomplete": 1,
        "JSONDecodeError": 1,
        "timeout": 1,
        "ClientPayloadError": 1,
        "malformed": 1,
    }
    assert summary.messages["429"] == "the queue is full"
    assert summary.messages["error event"] == "it broke"
    assert summary.messages["timeout"] == "no complete answer after 1 s"
    assert summary.num_completed == 1


async def test_a_server_that_is_gone(client):
    client._target = Target("http://127.0.0.1:9", "fake", 5.0)
    record = await client.send(request_of(0), 0.0)
    assert record.error == "ClientConnectorError"
    assert record.ttft_s is None


class OneAnswerEach:
    """Answers the first `num_answers` requests of a connection, and closes it when another comes.

    Attributes:
      requests: how many were sent on each connection.
    """

    def __init__(self, num_answers):
        self.url, self.requests, self._num_answers = "", [], num_answers

    async def serve(self, reader, writer):
        index = len(self.requests)
        self.requests.append(0)
        while head := await reader.readuntil(b"\r\n\r\n"):
            self.requests[index] += 1
            if self.requests[index] > self._num_answers:
                break
            await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
            events = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(events) + events)
        writer.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self):
        async with await asyncio.start_server(self.serve, "127.0.0.1", 0) as server:
            self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
            yield self


async def test_a_kept_connection_that_is_closed_is_no_failure(client):
    async with OneAnswerEach(1).running() as server:
        client._target = Target(server.url, "fake", 5.0)
        records = await client.closed_loop([request_of(0, 1) for _ in range(3)], 1)
    assert [record.error for record in records] == [None] * 3
    # Each after the first is sent on the connection of the one before, and again on a new one.
    assert server.requests == [2, 1, 1]


async def test_no_answer_on_a_new_connection_is_one(client):
    async with OneAnswerEach(0).running() as server:
        client._target = Target(server.url, "fake", 5.0)
        record = await client.send(request_of(0, 1), 0.0)
    assert record.error in ("ServerDisconnectedError", "ClientOSError")
    assert server.requests == [1, 1]


async def test_models_that_cannot_be_listed(fake):
    async with make_session(None) as session:
        assert await first_model(session, fake.url) == "fake"
        with pytest.raises(ValueError, match="/nothing/v1/models answered 404"):
            await first_model(session, fake.url + "/nothing")
