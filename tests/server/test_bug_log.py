"""Faults of other servers, as the bug log restates them: what no other file's tests ask.

`bug_log_cover.py` says which tests hold each entry.
"""

import asyncio
import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from server.bug_log_cover import COVER
from server.fake_engine import chat, until

from jaxinfer.config import ServerConfig
from jaxinfer.server.json_body import READ_TIMEOUT_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TESTS = Path(__file__).parents[1]


def test_every_test_of_the_cover_exists():
    for entry, tests in COVER.items():
        for test in tests:
            path, _, name = test.partition("::")
            text = (TESTS / path).read_text(encoding="utf-8")
            assert re.search(rf"def {name or 'test_'}", text), f"{entry}: {test}"


async def is_alive(server):
    """What every entry asks for at its end: the same answer as ever, and nothing left over."""
    status, body, _ = await server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 4})
    assert (status, body["choices"][0]["text"]) == (200, "hell")
    assert (await server.get("/health"))[0] == 200


async def refused(server, path, body, param=None):
    """Sends what must be a 400 streamed or not; returns the message."""
    for stream in (False, True):
        sent = body if isinstance(body, bytes) else {**body, "stream": stream}
        status, reply, headers = await server.post(path, sent)
        assert (status, headers["Content-Type"].split(";")[0]) == (400, "application/json"), reply
        error = reply["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        if param is not None:
            assert (error["param"] or "").startswith(param), error
        assert not re.search(r"Traceback|Error\b|/[a-z]+/[a-z]+\.py", error["message"])
    return error["message"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_b01_generation_that_ends_inside_a_character(server, engine, count, path):
    engine.text = "🌶 and more"
    body = {**(chat() if path == CHAT else {"prompt": "x"}), "max_tokens": count}
    _, whole, _ = await server.post(path, body)
    chunks = await server.chunks(path, {**body, "stream_options": {"include_usage": True}})
    pieces = [
        choice["delta"].get("content", "") if path == CHAT else choice["text"]
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    choice = whole["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert "".join(pieces) == text == ("🌶" if count == 4 else "\ufffd")
    assert whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == count


@pytest.mark.parametrize(
    ("text", "parameters", "expected", "reason"),
    [
        ("A B C O P Q R", {"stop": ["O P Q"]}, "A B C ", "stop"),
        ("ab\ncd", {"stop": ["\n"]}, "ab", "stop"),
        ("xxEN", {"stop": ["END"], "max_tokens": 4}, "xxEN", "length"),
        ("xxEN", {"stop": ["END"]}, "xxEN", "stop"),
        ("a foobar", {"stop": ["foo", "foobar"]}, "a ", "stop"),
        ("a foobar", {"stop": ["foobar", "foo"]}, "a ", "stop"),
        ("caféx", {"stop": ["é"]}, "caf", "stop"),
        ("llo", {"stop": ["hello", "ello"]}, "llo", "stop"),
        ("a END b", {"stop": "END", "include_stop_str_in_output": True}, "a END", "stop"),
    ],
    ids=str,
)
async def test_b02_stop_strings(server, engine, text, parameters, expected, reason):
    engine.text = text
    body = {"prompt": "he", "n": 2, **parameters}
    _, whole, _ = await server.post(COMPLETIONS, body)
    got = [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]]
    assert got == [(expected, reason)] * 2
    streamed = ["", ""]
    for chunk in await server.chunks(COMPLETIONS, body):
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
        assert expected.startswith(streamed[choice["index"]])
    assert streamed == [expected] * 2


async def test_b03_biases_outside_the_vocabulary(server):
    # Ids 258 to 319 are rows of the embedding that mean nothing.
    for key in ("258", "300", "319", "320", "-1", "999999999999", "1e3", "abc", "257.0"):
        await refused(server, CHAT, chat(logit_bias={key: -100}), "logit_bias")
    for value in (101, -101, None, "5"):
        await refused(server, CHAT, chat(logit_bias={"5": value}), "logit_bias")
    await refused(server, CHAT, chat(logit_bias={str(i % 258): 0 for i in range(258)} | {"x": 1}))
    assert (await server.post(CHAT, chat(logit_bias={"257": -100, "0": 1})))[0] == 200
    await is_alive(server)


HOSTILE = [
    *({"n": n} for n in (1_000_000, 0, -1, 129, 2.5, True)),
    *({"seed": seed} for seed in (2**64, 2**63, -(2**63) - 1)),
    *({"max_tokens": value} for value in (-1, 0)),
    *({"top_k": value} for value in (-5, 2**31)),
    {"max_tokens": 5, "min_tokens": 10**9},
    {"logprobs": True, "top_logprobs": 2**40},
    {"priority": 2**63},
    {"n_probs": -1},
    {"dry_allowed_length": -1},
    {"stop_token_ids": [-1]},
]


@pytest.mark.parametrize("parameters", HOSTILE, ids=str)
async def test_b04_hostile_integers_are_refused_at_once(server, parameters):
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        await refused(server, CHAT, chat(**parameters), list(parameters)[-1].split("_")[0])
        seconds.append((time.perf_counter() - began) / 2)
    assert min(seconds) < 0.05
    await is_alive(server)


async def test_b04_a_number_of_5000_digits(server):
    body = b'{"messages": [{"role": "user", "content": "x"}], "seed": %s}' % (b"9" * 5000)
    message = await refused(server, CHAT, body, "seed")
    assert len(message) < 300
    await is_alive(server)


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
async def test_b04_the_ends_of_the_range_are_seeds(server, engine, seed):
    assert (await server.post(CHAT, chat(seed=seed)))[0] == 200
    assert engine.requests[-1].params.seed == seed


@pytest.mark.parametrize("value", [2**31, 2**63 - 1, 2**63, 10**300])
async def test_b04_huge_max_tokens_mean_the_rest_of_the_context(server, engine, value):
    assert (await server.post(CHAT, chat(max_tokens=value)))[0] == 200
    request = engine.requests[-1]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)


async def test_b06_empty_prompts_and_messages(server):
    for prompt in ("", [""], [], [[]], ["a", ""], None):
        await refused(server, COMPLETIONS, {"prompt": prompt}, "prompt")
    await refused(server, COMPLETIONS, {}, "prompt")
    for messages in ([], None, "x", [None], [{}], [{"role": "user"}]):
        await refused(server, CHAT, {"messages": messages}, "messages")
    for content in (None, [], [{"type": "text"}], [{"type": "text", "text": None}]):
        message = {"role": "user", "content": content}
        await refused(server, CHAT, {"messages": [message]}, "messages[0].content")
    await refused(server, CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]")
    assert (await server.post(CHAT, chat("")))[0] == 200
    await is_alive(server)


async def test_b07_three_completions_at_the_last_position(server):
    body = {"prompt": [1] * 255, "n": 3, "max_tokens": 5}
    status, reply, _ = await server.post(COMPLETIONS, body)
    assert (status, len(reply["choices"])) == (200, 3)
    assert reply["usage"]["completion_tokens"] == 3
    assert {choice["finish_reason"] for choice in reply["choices"]} == {"length"}


HALF = b"a\\ud800b"
SURROGATES = [
    (CHAT, b'{"messages": [{"role": "user", "content": "%s"}]}'),
    (CHAT, b'{"messages": [{"role": "user%s", "content": "x"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "name": "%s", "content": "x"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "stop": "%s"}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "user": "%s"}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "%s"}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "%s": 1}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"%s": {}}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "%s"}]}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"s": "%s"}}'),
    (COMPLETIONS, b'{"prompt": "%s"}'),
    (COMPLETIONS, b'{"prompt": ["a", "%s"], "stream": true}'),
    ("/tokenize", b'{"prompt": "%s"}'),
]


@pytest.mark.parametrize(("path", "body"), SURROGATES, ids=lambda value: str(value)[-40:])
async def test_b08_half_a_surrogate_pair_anywhere(server, path, body):
    await refused(server, path, body % HALF)
    await is_alive(server)


@pytest.mark.parametrize("text", ["\\ud83d\\ude00", "\\u0000", "\\ufeff", "\\uffff"])
async def test_b08_unusual_text_that_is_right(server, text):
    body = b'{"prompt": "%s", "echo": true, "max_tokens": 1}' % text.encode()
    status, reply, _ = await server.post(COMPLETIONS, body)
    assert (status, reply["choices"][0]["text"]) == (200, json.loads(f'"{text}"') + "h")


async def test_b10_templates_and_variables_from_a_request(server):
    bomb = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    await refused(server, CHAT, chat(chat_template=bomb), "chat_template")
    reserved = ("messages", "tools", "add_generation_prompt", "chat_template", "tokenize")
    for name in (*reserved, "conversation", "return_dict"):
        kwargs = {name: bomb}
        await refused(server, CHAT, chat(chat_template_kwargs=kwargs), "chat_template_kwargs")
    nested = {"x": {"chat_template": bomb}}
    status, _, _ = await server.post(CHAT, chat(chat_template_kwargs=nested))
    assert status in (200, 400)
    await is_alive(server)


async def raw(server, *parts):
    """Sends bytes on one connection; returns the beginning of the reply, b"" if it was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(5):
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                return await reader.read(1000)
            except ConnectionError:
                return b""
    finally:
        writer.close()


POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_HTTP = {
    "request line": [b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
    "one header": [b"GET /health HTTP/1.1\r\nHost: x\r\nX: ", *[b"a" * 65_536] * 20, b"\r\n\r\n"],
    "many headers": [b"GET /health HTTP/1.1\r\nHost: x\r\n", *[b"X: 1\r\n" * 5_000] * 20, b"\r\n"],
    "lengths": [POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"],
    "length and chunks": [POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"],
    "negative length": [POST + b"Content-Length: -5\r\n\r\n"],
    "announced": [POST + b"Content-Length: 10000000000\r\n\r\n"],
    "chunk extension": [CHUNKED + b"2;", *[b"x" * 65_536] * 20, b"\r\n{}\r\n0\r\n\r\n"],
}


@pytest.mark.parametrize("name", BAD_HTTP)
async def test_b23_http_that_is_too_large_or_contradicts_itself(server, name, monkeypatch):
    monkeypatch.setattr("jaxinfer.server.json_body.READ_TIMEOUT_S", 0.2)
    reply = await raw(server, *BAD_HTTP[name])
    assert reply == b"" or reply.split(b" ")[1][:1] == b"4", reply
    await is_alive(server)


async def test_b23_a_body_that_never_ends_is_cut(start):
    server = await start(max_body_bytes=100_000)
    reply = await raw(server, CHUNKED, *[b"1000\r\n" + b"x" * 4096 + b"\r\n"] * 100)
    assert reply == b"" or b" 413 " in reply.split(b"\r\n")[0]
    await is_alive(server)


async def test_b23_idle_sockets_hold_nothing_up(server):
    async with contextlib.AsyncExitStack() as stack:
        for number in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            stack.callback(writer.close)
            if number % 2:
                writer.write(POST + b"Content-Length: 50\r\n\r\n{")
        # Well before the server gives up on what they began.
        async with asyncio.timeout(READ_TIMEOUT_S / 2):
            await is_alive(server)


async def test_b24_nothing_is_fetched_for_a_request(server):
    visits = []
    listener = await asyncio.start_server(lambda *pair: visits.append(pair), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/x.png"
    data = "data:image/png;base64," + "A" * 100_000
    for where in (url, "file:///etc/passwd", data):
        for part in (
            {"type": "image_url", "image_url": {"url": where}},
            {"type": "input_audio", "input_audio": {"data": where, "format": "wav"}},
            {"type": "file", "file": {"file_id": where}},
        ):
            body = {"messages": [{"role": "user", "content": [part]}]}
            message = await refused(server, CHAT, body, "messages[0].content[0]")
            assert "root:" not in message
    assert (await server.post(CHAT, chat(f"![picture]({url}) and {url}")))[0] == 200
    await asyncio.sleep(0.05)
    listener.close()
    assert visits == []
    await is_alive(server)


def test_b24_the_address_is_local_by_default():
    assert ServerConfig().host == "127.0.0.1"


async def test_alive_means_that_nothing_runs(server, engine):
    await is_alive(server)
    await until(lambda: not engine.running)
