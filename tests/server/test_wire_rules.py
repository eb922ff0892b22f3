"""The wire rules real clients rely on, on raw bytes: W1 to W24 of the conformance notes."""

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
