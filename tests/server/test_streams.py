"""Streamed and whole answers of a real, tiny model are the same, byte for byte."""

import asyncio
import json
import random

import aiohttp
import pytest
from tiny_server import tiny_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PIECES = ["hello ", "é", "日本", "🌶️", "\n\n", "a\tb", "x" * 9, "\u2028", "Привет", "\x00", "END"]
NUM_PROMPTS = 200
AT_ONCE = 4


def requests():
    """200 requests of all kinds, the same ones in every run."""
    draw = random.Random(7)
    for number in range(NUM_PROMPTS):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 4)))[:20]
        body = {"max_tokens": draw.randint(1, 16), "temperature": 0}
        if number % 3 == 0:
            # Sampled bytes are seldom whole characters.
            body |= {"temperature": 1.5, "seed": number}
        if number % 4 == 0:
            body["n"] = 3
        if number % 5 == 0:
            body["stop"] = draw.choices(["a", "e", "\ufffd", "zz", "é"], k=2)
        if number % 7 == 0:
            body["include_stop_str_in_output"] = True
        if number % 2:
            yield CHAT, {**body, "messages": [{"role": "user", "content": text}]}
        else:
            yield COMPLETIONS, {**body, "prompt": text, "echo": number % 8 == 0}


async def whole(session, url, body):
    async with session.post(url, json=body) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
    choices = [
        (choice["message"]["content"] if "message" in choice else choice["text"], ending(choice))
        for choice in answer["choices"]
    ]
    return choices, counts(answer)


async def streamed(session, url, body):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(url, json={**body, **options}) as reply:
        events = (await reply.read()).removesuffix(b"\n\n").split(b"\n\n")
    assert events.pop() == b"data: [DONE]"
    *chunks, last = [json.loads(event.removeprefix(b"data: ")) for event in events]
    texts, endings = [""] * body.get("n", 1), [None] * body.get("n", 1)
    for chunk in chunks:
        [choice] = chunk["choices"]
        delta = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] += delta
        if choice["finish_reason"] is not None:
            assert endings[choice["index"]] is None
            endings[choice["index"]] = ending(choice)
    return list(zip(texts, endings, strict=True)), counts(last)


def ending(choice):
    return choice["finish_reason"], choice["stop_reason"]


def counts(answer):
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}


@pytest.mark.slow
async def test_streamed_text_is_the_whole_text(monkeypatch):
    kinds = set()
    async with tiny_server(monkeypatch) as server, aiohttp.ClientSession() as session:
        turns = asyncio.Semaphore(AT_ONCE // 2)

        async def compare(path, body):
            async with turns:
                first = await whole(session, server.url + path, body)
                second = await streamed(session, server.url + path, body)
            assert first == second, body
            kinds.update(end[0] for _, end in first[0])
            kinds.update("not ASCII" for text, _ in first[0] if not text.isascii())

        await asyncio.gather(*(compare(path, body) for path, body in requests()))
    assert kinds >= {"stop", "length", "not ASCII"}
