"""The error map: every failure has its status and OpenAI's error object."""

import asyncio
import gzip

import pytest
from server.fake_engine import chat, until

from jaxinfer.async_engine import EngineDeadError, QueueFullError
from jaxinfer.sampling_params import InvalidParameter
from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate, TemplateError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def error_of(body):
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    return error


async def test_unknown_paths_and_methods(server):
    status, body, _ = await server.get("/nowhere")
    assert (status, error_of(body)["type"]) == (404, "invalid_request_error")
    status, body, headers = await server.get(CHAT)
    assert (status, headers["Allow"]) == (405, "POST")
    assert "POST" in error_of(body)["message"]


async def test_unknown_models(start):
    server = await start(served_model_name=("org/small", "alias"))
    for name in ("org/small", "alias"):
        assert (await server.post(CHAT, chat(model=name)))[1]["model"] == name
    assert (await server.post(CHAT, chat()))[1]["model"] == "org/small"
    for name in ("tiny", "", "x" * 5000):
        status, body, _ = await server.post(CHAT, chat(model=name))
        assert (status, error_of(body)["code"], body["error"]["param"]) == (
            404,
            "model_not_found",
            "model",
        )
    status, body, _ = await server.get("/v1/models")
    assert [model["id"] for model in body["data"]] == ["org/small", "alias"]
    assert body["data"][0]["max_model_len"] == 256
    for path in ("/v1/models/org/small", "/models/org%2Fsmall"):
        status, body, _ = await server.get(path)
        assert (status, body["id"]) == (200, "org/small")
    assert (await server.get("/v1/models/other"))[0] == 404


async def test_a_length_above_the_limit_is_refused_before_the_body_comes(start):
    server = await start(max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {{}}\r\n\r\n"
    writer.write(head.format(1001).encode())
    async with asyncio.timeout(5):
        reply = await reader.readuntil(b"}}")
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in reply
    writer.write(b" " * 1001)  # the connection can be used on
    writer.write(head.format(2).encode() + b"{}")
    async with asyncio.timeout(5):
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_bodies_that_cannot_be_read(start):
    server = await start(max_body_bytes=1000)
    status, body, _ = await server.post(CHAT, b"{")
    assert (status, error_of(body)["code"]) == (400, None)
    status, body, _ = await server.post(CHAT, b" " * 2000)
    assert (status, error_of(body)["code"]) == (413, "request_too_large")
    packed = gzip.compress(b"{}")
    status, body, _ = await server.post(CHAT, packed, headers={"Content-Encoding": "gzip"})
    assert status == 415
    error_of(body)


async def test_a_body_that_never_comes(server, monkeypatch):
    monkeypatch.setattr("jaxinfer.server.json_body.READ_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_body_that_is_not_well_encoded(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"2\r\n{}\r\nzz\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "request_bytes",
    [b"\x16\x03\x01 not http\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"],
    ids=["noise", "giant header"],
)
async def test_what_is_not_http_gets_an_error_object_too(server, request_bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request_bytes)
    reply = await reader.read()
    assert reply.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert b'"invalid_request_error"' in reply
    writer.close()
    assert (await server.get("/health"))[0] == 200


async def test_a_full_queue_says_when_to_come_back(server, engine):
    engine.fault = QueueFullError("512 requests wait")
    for stream in (True, False):
        status, body, headers = await server.post(CHAT, chat(stream=stream))
        assert (status, headers["Retry-After"]) == (429, "1")
        assert error_of(body)["code"] == "queue_full"


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (EngineDeadError("gone"), 503, "unavailable"),
        (RuntimeError("secret detail"), 500, "internal_error"),
        ("error", 500, "internal_error"),
        ("abort", 503, "unavailable"),
    ],
    ids=str,
)
@pytest.mark.parametrize("fault_after", [0, 2])
async def test_a_failing_engine(server, engine, fault, status, code, fault_after):
    engine.fault, engine.fault_after = fault, fault_after
    got, body, headers = await server.post(CHAT, chat(), headers={"X-Request-Id": "mine"})
    assert (got, error_of(body)["code"]) == (status, code)
    assert "secret" not in str(body)
    assert headers["X-Request-Id"] == "mine"
    engine.fault = None
    assert (await server.post(CHAT, chat()))[0] == 200


async def test_one_failing_prompt_fails_the_request_and_aborts_the_others(server, engine):
    engine.fault, engine.fault_after = "error", 1
    status, _, _ = await server.post(COMPLETIONS, {"prompt": ["a", "b", "c"]})
    assert status == 500
    assert not engine.running


async def test_prompts_are_logged_only_when_asked_for_and_never_whole(start, caplog):
    caplog.set_level("INFO")
    quiet = await start()
    await quiet.post(CHAT, chat("private words"))
    assert "private" not in caplog.text
    chatty = await start(log_requests=True)
    await chatty.post(CHAT, chat("private words" + "x" * 220))
    assert "private words" in caplog.text
    assert "x" * 201 not in caplog.text


async def test_request_timeout(start, engine):
    server = await start(request_timeout=0.1)
    engine.gate.clear()
    for body in (chat(), chat(stream=True)):
        status, reply, _ = await server.post(CHAT, body)
        assert (status, error_of(reply)["code"]) == (504, "request_timeout")
    assert not engine.running


async def test_request_timeout_in_a_stream_is_an_event(start, engine):
    server = await start(request_timeout=0.2)
    engine.text = "x" * 10
    asyncio.get_running_loop().call_later(0.05, engine.gate.clear)

    async def slow(request, generate=engine.generate):
        async for delta in generate(request):
            yield delta
            await asyncio.sleep(0.03)

    engine.generate = slow
    events = await server.events(CHAT, chat())
    assert b"request_timeout" in events[-1]


async def test_templates_refuse_with_their_own_words(server):
    message = {"role": "tool", "content": "x", "tool_call_id": "1"}
    status, body, _ = await server.post(CHAT, {"messages": [message]})
    error = error_of(body)
    assert (status, error["param"], error["code"]) == (400, "messages", "invalid_value")
    assert "no tools" in error["message"]


async def test_a_model_without_template_completes_but_does_not_chat(server, engine):
    engine.chat_template = ChatTemplate.from_tokenizer(byte_tokenizer())
    status, body, _ = await server.post(CHAT, chat())
    assert status == 400
    assert "--chat-template" in error_of(body)["message"]
    assert (await server.post(COMPLETIONS, {"prompt": "x"}))[0] == 200


async def test_a_slow_template_times_out_and_blocks_nobody(server, engine, monkeypatch):
    monkeypatch.setattr("jaxinfer.server.threads.TIMEOUT_S", 0.1)
    import time

    def render(self, messages, **options):
        time.sleep(0.4)
        raise TemplateError("too late")

    monkeypatch.setattr(ChatTemplate, "render", render)
    request = asyncio.create_task(server.post(CHAT, chat()))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(0.1):
        assert (await server.get("/health"))[0] == 200
        assert (await server.post(COMPLETIONS, {"prompt": "x"}))[0] == 200
    status, body, _ = await request
    assert status == 400
    assert "took more than" in error_of(body)["message"]


class TestContext:
    """A prompt at the context limit of 256 tokens."""

    @pytest.mark.parametrize("max_tokens", [1, 2, 300, 2**63])
    async def test_the_last_position_can_be_generated(self, server, engine, max_tokens):
        body = {"prompt": [1] * 255, "max_tokens": max_tokens}
        status, reply, _ = await server.post(COMPLETIONS, body)
        assert status == 200
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 1

    @pytest.mark.parametrize("length", [256, 257, 1000])
    async def test_no_room_is_a_400_with_both_numbers(self, server, length):
        for stream in (False, True):
            body = {"prompt": [1] * length, "stream": stream}
            status, reply, _ = await server.post(COMPLETIONS, body)
            error = error_of(reply)
            assert (status, error["code"], error["param"]) == (
                400,
                "context_length_exceeded",
                "prompt",
            )
            assert "This model's maximum context length is 256 tokens" in error["message"]
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (length, 256)

    async def test_max_tokens_is_clamped(self, server, engine):
        engine.text = "x" * 300
        status, reply, _ = await server.post(COMPLETIONS, {"prompt": [1] * 250, "max_tokens": 10})
        assert (status, reply["usage"]["completion_tokens"]) == (200, 6)
        body = {"prompt": [1] * 250, "max_tokens": 10, "min_tokens": 8}
        assert (await server.post(COMPLETIONS, body))[0] == 200

    async def test_chat_uses_the_rest_of_the_context(self, server, engine):
        await server.post(CHAT, chat())
        request = engine.requests[-1]
        assert request.params.max_tokens == 256 - len(request.prompt_token_ids)
        status, reply, _ = await server.post(CHAT, chat("x" * 300))
        assert (status, error_of(reply)["param"]) == (400, "messages")

    async def test_min_tokens_beyond_the_context(self, server):
        status, reply, _ = await server.post(CHAT, chat(min_tokens=250))
        assert (status, error_of(reply)["param"]) == (400, "min_tokens")

    async def test_what_never_fits_the_pool_is_a_400(self, server, engine):
        engine.refusal = InvalidParameter("max_tokens", "needs more KV pages than the pool has")
        status, reply, _ = await server.post(COMPLETIONS, {"prompt": "x", "stream": True})
        assert (status, error_of(reply)["param"]) == (400, "max_tokens")
        assert not engine.requests

    async def test_default_max_tokens_of_the_operator(self, start, engine):
        server = await start(default_max_tokens=4)
        await server.post(CHAT, chat())
        await server.post(COMPLETIONS, {"prompt": "x"})
        assert [request.params.max_tokens for request in engine.requests] == [4, 4]


class TestKeys:
    """Authentication, when keys are configured."""

    @pytest.fixture
    async def server(self, start):
        return await start(api_key=("first", "sécond"))

    @pytest.mark.parametrize(
        "headers",
        [
            {"Authorization": "Bearer first"},
            {"Authorization": "bearer  first"},
            {"Authorization": "Bearer sécond"},
            {"X-Api-Key": "first"},
        ],
        ids=str,
    )
    async def test_known_keys(self, server, headers):
        assert (await server.post(CHAT, chat(), headers=headers))[0] == 200

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer firs"},
            {"X-Api-Key": "no"},
            {"Authorization": "Basic first"},
            {"Authorization": "Bearer first x"},
        ],
        ids=str,
    )
    async def test_all_else_is_the_same_401(self, server, headers, caplog):
        bodies = []
        for given in (headers, {}):
            status, body, reply = await server.post(CHAT, chat(), headers=given)
            assert (status, reply["WWW-Authenticate"]) == (401, "Bearer")
            bodies.append(body)
        assert bodies[0] == bodies[1]
        assert error_of(bodies[0])["code"] == "invalid_api_key"
        assert (await server.get("/nowhere", headers=headers))[0] == 401
        assert "first" not in caplog.text

    async def test_what_needs_no_key(self, server):
        for path in ("/health", "/health/live", "/ping"):
            assert (await server.get(path))[0] == 200
        async with server.session.get(server.url + "/metrics") as response:
            assert response.status == 200

    async def test_metrics_can_be_protected(self, start):
        server = await start(api_key=("first",), protect_metrics=True)
        assert (await server.get("/metrics"))[0] == 401


@pytest.mark.parametrize("given", ["abc", "a" * 128])
async def test_request_ids_are_echoed(server, given):
    for path in ("/health", "/nowhere"):
        _, _, headers = await server.get(path, headers={"X-Request-Id": given})
        assert headers["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "h\u00e9"])
async def test_unfit_request_ids_are_replaced(server, given):
    _, _, headers = await server.get("/health", headers={"X-Request-Id": given})
    assert headers["X-Request-Id"].startswith("req-")


async def test_loading_draining_and_dead(start, engine):
    engine.loaded_event.clear()
    server = await start(wait=False)
    for path in ("/health", "/v1/models"):
        status, body, headers = await server.get(path)
        assert (status, error_of(body)["message"]) == (503, "Loading model")
        assert int(headers["Retry-After"]) > 0
    assert (await server.get("/health/live"))[0] == 200
    assert (await server.post(CHAT, chat()))[0] == 503
    async with server.session.get(server.url + "/metrics") as response:
        assert response.status == 200
    engine.loaded_event.set()
    await until(lambda: engine.state == "ready")
    assert (await server.get("/health"))[0] == 200
    async with server.session.head(server.url + "/health") as response:
        assert response.status == 200
    engine.state = "draining"
    status, body, headers = await server.post(CHAT, chat())
    assert (status, headers["Connection"]) == (503, "close")
    engine.state = "dead"
    assert (await server.get("/health"))[0] == 503
    assert (await server.get("/health/live"))[0] == 503
