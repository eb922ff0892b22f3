"""A line of the log for each request: which fields, in which form, and what never gets there."""

import io
import json
import logging

import pytest
from server.fake_engine import chat, until

from jaxinfer.log_format import formatter
from jaxinfer.outputs import PhaseTimes

CHAT = "/v1/chat/completions"
FIELDS = {"request_id", "model", "route", "status", "prompt_tokens", "cached_tokens",
          "completion_tokens", "finish_reason", "queue_s", "ttft_s", "e2e_s",
          "client"}  # fmt: skip


@pytest.fixture
def lines():
    """Returns a function from a format to the lines that the server has logged in it."""
    logger = logging.getLogger("jaxinfer")
    level = logger.level
    logger.setLevel("DEBUG")
    handlers = {kind: logging.StreamHandler(io.StringIO()) for kind in ("json", "text")}
    for kind, handler in handlers.items():
        handler.setFormatter(formatter(kind))
        logger.addHandler(handler)
    yield lambda kind: handlers[kind].stream.getvalue().splitlines()
    for handler in handlers.values():
        logger.removeHandler(handler)
    logger.setLevel(level)


async def requests_in(lines, count=1):
    """Waits until so many requests have their line, and returns those."""

    def found():
        return [line for line in map(json.loads, lines("json")) if "route" in line]

    await until(lambda: len(found()) >= count)
    return found()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_says_what_became_of_a_request(server, engine, lines, stream):
    engine.num_cached, engine.times = 3, PhaseTimes(0.001, 0.002)
    headers = {"X-Request-Id": "mine"}
    url = server.url + CHAT + "?key=secret"
    async with server.session.post(url, json=chat(stream=stream), headers=headers) as response:
        await response.read()
    [line] = await requests_in(lines)
    assert FIELDS | {"ts", "level", "logger"} == set(line)
    assert (line["request_id"], line["route"], line["status"]) == ("mine", CHAT, 200)
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (19, 6, 3)
    assert (line["finish_reason"], line["model"], line["level"]) == ("stop", "tiny", "info")
    assert line["client"] == "127.0.0.1"
    assert 0 <= line["ttft_s"] <= line["e2e_s"]
    assert 0 <= line["queue_s"] <= line["e2e_s"]
    assert line["ts"].endswith("+00:00")
    assert "secret" not in "".join(lines("json"))
    assert "<user>" not in "".join(lines("json"))
    [text] = [line for line in lines("text") if "jaxinfer.access: {" in line]
    fields = json.loads(text.split("jaxinfer.access: ", 1)[1])
    assert fields == {name: line[name] for name in FIELDS}


async def test_what_fails_has_a_line_too(server, engine, lines):
    await server.post(CHAT, chat(temperature=9))
    await server.post(CHAT, b"{")
    await server.post(CHAT, chat(model="nope"))
    engine.fault = "error"
    await server.post(CHAT, chat())
    found = await requests_in(lines, 4)
    assert [line["status"] for line in found] == [400, 400, 404, 500]
    assert [line.get("model") for line in found] == ["tiny", None, None, "tiny"]
    assert found[-1]["finish_reason"] == "error"


async def test_a_client_that_leaves_is_an_abort(server, engine, lines):
    engine.gate.clear()
    _, writer = await server.raw(chat())
    await until(lambda: engine.running)
    writer.close()
    await writer.wait_closed()
    [line] = await requests_in(lines)
    assert (line["status"], line["finish_reason"]) == (499, "abort")


async def test_health_checks_are_for_debugging(server, lines):
    await server.get("/health")
    [line] = await requests_in(lines)
    assert (line["route"], line["level"]) == ("/health", "debug")


def test_any_line_is_one_object(lines):
    logger = logging.getLogger("jaxinfer.test")
    try:
        raise ValueError("why\nand how")
    except ValueError:
        logger.exception("it failed: %s", "a\nb")
    [line] = map(json.loads, lines("json"))
    assert (line["level"], line["logger"]) == ("error", "jaxinfer.test")
    assert line["message"] == "it failed: a\nb"
    assert "ValueError: why\nand how" in line["exception"]
