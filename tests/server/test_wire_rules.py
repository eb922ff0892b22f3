"""The wire rules real clients rely on, on raw bytes: W1 to W24 of the conformance notes.

| rule | test |
| --- | --- |
| W1, W3 | test_role_comes_once_per_choice_in_order_before_any_content |
| W2, W4 | test_tools_answers.py: test_wire_rules_of_streamed_calls |
| W5 | test_w5_no_numbers_inside_deltas |
| W6 | test_identity_is_the_same_in_every_chunk |
| W7 | test_every_event_is_one_line_by_any_definition, test_text_is_utf8_not_escapes |
| W8 | test_w8_a_stream_ends_with_done_and_a_clean_end |
| W9 | test_an_error_after_the_headers_is_an_event_and_nothing_follows |
| W10 | test_w10_a_broken_stream_is_never_a_clean_end |
| W11 | test_pings_are_whole_comments |
| W12 | test_w12_ordinary_chunks_have_data_lines_only |
| W13 | test_continuous_usage_grows, test_w13_usage_of_whole_replies_adds_up |
| W14 | test_usage_is_one_chunk_without_choices_before_done |
| W15 | test_an_empty_answer_still_has_a_chunk |
| W16 | test_whole_replies_have_the_closed_set_of_finish_reasons |
| W17, W18, W20 | test_w17_w18_w20_every_error_is_the_object_with_its_status |
| W19 | test_both_base_urls_work, test_w19_every_path_of_the_api_works_without_its_prefix |
| W21 | test_any_key_and_any_header_is_fine_without_keys |
| W22 | test_w22_nothing_but_the_request_itself_is_needed |
| W23 | test_null_means_absent |
| W24 | test_w24_one_connection_takes_errors_and_answers_in_turn, test_an_early_close_... |
"""

import asyncio
import json

import pytest
from server.fake_engine import chat, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def deltas(chunks):
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


async def test_role_comes_once_per_choice_in_order_before_any_content(server):
    chunks = await server.chunks(CHAT, chat(n=3))
    assert [c["choices"][0]["index"] for c in chunks[:3]] == [0, 1, 2]
    assert all(d == {"role": "assistant", "content": ""} for d in deltas(chunks[:3]))
    assert all("role" not in delta for delta in deltas(chunks[3:]))


async def test_identity_is_the_same_in_every_chunk(server):
    chunks = await server.chunks(CHAT, chat())
    for key in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[key] for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\n\n", "\r"])
async def test_every_event_is_one_line_by_any_definition(server, engine, separator):
    engine.text = f"a{separator}b"
    events = await server.events(CHAT, chat())
    for event in events:
        assert len(event.decode().splitlines()) == 1
        assert event.startswith(b"data: ")
    text = "".join(
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in json.loads(event[6:])["choices"]
    )
    assert text == engine.text


async def test_text_is_utf8_not_escapes(server, engine):
    engine.text = "你好🌶️"
    events = await server.events(CHAT, chat())
    assert "你".encode() in b"".join(events)


async def test_the_finish_reason_has_a_chunk_of_its_own(server):
    chunks = await server.chunks(CHAT, chat())
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({}, "stop")
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_is_one_chunk_without_choices_before_done(server, path):
    body = chat() if path == CHAT else {"prompt": "hi"}
    plain = await server.chunks(path, body)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in plain)
    *rest, last = await server.chunks(path, {**body, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None for chunk in rest)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6  # "hello" and the end of sequence
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_continuous_usage_grows(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await server.chunks(CHAT, chat(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 6


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_empty_answer_still_has_a_chunk(server, engine, path):
    engine.text = ""
    chunks = await server.chunks(path, chat() if path == CHAT else {"prompt": "x"})
    assert chunks[0]["choices"]


async def test_an_error_after_the_headers_is_an_event_and_nothing_follows(server, engine):
    engine.fault, engine.fault_after = "error", 2
    events = await server.events(CHAT, chat())
    error = json.loads(events[-1].removeprefix(b"data: "))
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["code"] == "internal_error"
    assert b"boom" not in events[-1]
    assert b"data: [DONE]" not in events


async def test_an_error_before_the_first_token_has_its_own_status(server, engine):
    engine.fault = "error"
    status, body, headers = await server.post(CHAT, chat(stream=True))
    assert status == 500
    assert headers["Content-Type"].startswith("application/json")
    assert body["error"]["type"] == "server_error"


async def test_pings_are_whole_comments(server, engine, monkeypatch):
    monkeypatch.setattr("jaxinfer.server.sse.PING_INTERVAL_S", 0.02)
    monkeypatch.setattr("jaxinfer.server.sse.PATIENCE_S", 0.02)
    monkeypatch.setattr("jaxinfer.server.replies.PATIENCE_S", 0.02)
    engine.gate.clear()
    asyncio.get_running_loop().call_later(0.2, engine.gate.set)
    events = await server.events(CHAT, chat())
    assert events.count(b": ping") >= 2
    assert events[-1] == b"data: [DONE]"


async def test_whole_replies_have_the_closed_set_of_finish_reasons(server):
    for max_tokens, reason in ((2, "length"), (50, "stop")):
        status, body, headers = await server.post(CHAT, chat(max_tokens=max_tokens))
        assert status == 200
        assert headers["Content-Type"].startswith("application/json")
        choice = body["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"]["refusal"] is None


@pytest.mark.parametrize("prefix", ["/v1", ""])
async def test_both_base_urls_work(server, prefix):
    assert (await server.post(f"{prefix}/chat/completions", chat()))[0] == 200
    assert (await server.post(f"{prefix}/completions", {"prompt": "x"}))[0] == 200
    assert (await server.get(f"{prefix}/models"))[0] == 200
    assert (await server.get(f"{prefix}/models/tiny"))[0] == 200


async def test_any_key_and_any_header_is_fine_without_keys(server):
    headers = {
        "Authorization": "Bearer EMPTY",
        "X-Stainless-Lang": "python",
        "Idempotency-Key": "1",
        "Content-Type": "application/x-www-form-urlencoded",
    }
    assert (await server.post(CHAT, chat(), headers=headers))[0] == 200


async def test_null_means_absent(server):
    nulls = dict.fromkeys(
        ("temperature", "stop", "n", "logprobs", "max_tokens", "seed", "tools", "stream", "user")
    )
    assert (await server.post(CHAT, {**chat(), **nulls}))[0] == 200


@pytest.mark.parametrize("body", [chat(stream=True), chat(temperature=9)])
async def test_a_connection_is_reused_after_a_stream_and_after_an_error(server, body):
    reader, writer = await server.raw(body)
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Content-Length" in head:
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    else:
        assert b"chunked" in head
        await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_an_early_close_leaves_the_server_well(server, engine):
    engine.gate.clear()
    _, writer = await server.raw(chat(stream=True))
    await until(lambda: engine.running)
    writer.transport.abort()
    await until(lambda: not engine.running)
    engine.gate.set()
    assert (await server.post(CHAT, chat()))[0] == 200


async def test_streams_and_whole_replies_say_the_same(server, engine):
    for text, extra in (
        ("d\u010f 🌶️ 你好 👩‍👩‍👧 ", {}),
        ("a END b", {"stop": "END"}),
        ("xxEN", {"stop": ["END"]}),
    ):
        engine.text = text
        _, whole, _ = await server.post(CHAT, chat(n=2, **extra))
        chunks = await server.chunks(CHAT, chat(n=2, **extra))
        for index in range(2):
            streamed = "".join(
                choice["delta"].get("content", "")
                for chunk in chunks
                for choice in chunk["choices"]
                if choice["index"] == index
            )
            assert streamed == whole["choices"][index]["message"]["content"]
        assert streamed == text.split("END")[0]


async def raw_stream(server, body, path=CHAT):
    """Returns the head of a streamed reply and its body, out of their chunks."""
    reader, writer = await server.raw({**body, "stream": True}, path)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    data = b""
    while (size := int(await reader.readline(), 16)) > 0:
        data += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    # Nothing follows: the connection waits for the next request.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.read(1)
    writer.close()
    return head, data


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_w8_a_stream_ends_with_done_and_a_clean_end(server, path):
    head, data = await raw_stream(server, chat() if path == CHAT else {"prompt": "x"}, path)
    assert "content-type: text/event-stream" in head
    assert data.endswith(b"\n\ndata: [DONE]\n\n")
    assert data.count(b"[DONE]") == 1


@pytest.mark.parametrize("fault_after", [1, 3])
async def test_w10_a_broken_stream_is_never_a_clean_end(server, engine, fault_after):
    engine.fault, engine.fault_after = "error", fault_after
    _, data = await raw_stream(server, chat(stream_options={"include_usage": True}))
    *chunks, last = [json.loads(event[6:]) for event in data.decode().split("\n\n")[:-1]]
    assert set(last) == {"error"}
    assert all(c["choices"][0]["finish_reason"] is None and not c["usage"] for c in chunks)


async def test_w5_no_numbers_inside_deltas(server, engine):
    def numbers(value, path=""):
        if isinstance(value, dict):
            return [found for key in value for found in numbers(value[key], f"{path}.{key}")]
        if isinstance(value, list):
            return [found for item in value for found in numbers(item, path)]
        return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []

    engine.text = "text"
    body = chat(return_token_ids=True, logprobs=True, top_logprobs=1)
    found = {path for delta in deltas(await server.chunks(CHAT, body)) for path in numbers(delta)}
    assert found <= {".tool_calls.index"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_w12_ordinary_chunks_have_data_lines_only(server, path):
    body = chat(n=2) if path == CHAT else {"prompt": ["x", "y"]}
    for event in await server.events(path, body):
        [line] = event.split(b"\n")
        assert line.startswith(b"data: ")


async def test_w13_usage_of_whole_replies_adds_up(server):
    for body in (chat(n=3), chat(max_tokens=2)):
        usage = (await server.post(CHAT, body))[1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


ERRORS = {
    "400": ("POST", CHAT, b"{", 400),
    "404 path": ("GET", "/v1/nothing", None, 404),
    "404 model": ("POST", CHAT, json.dumps(chat(model="other")).encode(), 404),
    "405": ("GET", CHAT, None, 405),
    "405 with a body": ("PUT", "/v1/models", b"{}", 405),
    "413": ("POST", CHAT, b" " * 3000, 413),
    "415": ("POST", CHAT, b"{}", 415),
    "500": ("POST", COMPLETIONS, b'{"prompt": "x"}', 500),
    "500 streamed": ("POST", COMPLETIONS, b'{"prompt": "x", "stream": true}', 500),
}


@pytest.mark.parametrize("name", ERRORS)
async def test_w17_w18_w20_every_error_is_the_object_with_its_status(start, engine, name):
    server = await start(max_body_bytes=2000)
    method, path, body, expected = ERRORS[name]
    headers = {"Content-Encoding": "gzip"} if expected == 415 else {}
    if expected == 500:
        engine.fault = RuntimeError("boom")
    async with server.session.request(
        method, server.url + path, data=body, headers=headers
    ) as reply:
        assert reply.status == expected
        assert reply.content_type == "application/json"
        error = (await reply.json())["error"]
    assert isinstance(error["message"], str)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert "boom" not in error["message"]


async def test_w19_every_path_of_the_api_works_without_its_prefix(server):
    paths = {route.resource.canonical for route in server.app.router.routes() if route.resource}
    api = {path for path in paths if path.startswith("/v1/")}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= api
    assert {path.removeprefix("/v1") for path in api} <= paths


async def test_w22_nothing_but_the_request_itself_is_needed(server):
    body = json.dumps(chat()).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    for extra in ("", "X-Stainless-Retry-Count: 0\r\nX-Correlation-ID: \t1\r\nAccept: */*\r\n"):
        writer.write(f"{head}{extra}\r\n".encode() + body)
        assert b" 200 " in await reader.readline()
        reply = await reader.readuntil(b"\r\n\r\n")
        length = int(reply.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"]
    writer.close()


async def test_w24_one_connection_takes_errors_and_answers_in_turn(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for body, status in ((chat(n=0), 400), (chat(), 200), (chat(model="x"), 404), (chat(), 200)):
        data = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        assert str(status).encode() in await reader.readline()
        reply = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(reply.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()
