"""The cells of aiohttp and curl."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from cells import MESSAGES, cell


@cell("aiohttp", "chat")
async def aiohttp_chat(at: Any) -> None:
    import aiohttp

    body = {"model": at.model, "messages": MESSAGES, "max_tokens": 6}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{at.url}/chat/completions", json=body) as reply,
    ):
        assert reply.status == 200
        assert (await reply.json())["choices"][0]["message"]["content"]


@cell("aiohttp", "chat stream, by lines")
async def aiohttp_stream(at: Any) -> None:
    import aiohttp

    body = {"model": at.model, "messages": MESSAGES, "max_tokens": 6, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{at.v1}/chat/completions", json=body) as reply,
    ):
        assert reply.content_type == "text/event-stream"
        lines = [line async for line in reply.content]
    assert lines[-2:] == [b"data: [DONE]\n", b"\n"]


@cell("aiohttp", "an error on a kept connection")
async def aiohttp_error(at: Any) -> None:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(connector=connector) as session:
        for max_tokens, status in ((0, 400), (2, 200), (-1, 400), (2, 200)):
            body = {"model": at.model, "messages": MESSAGES, "max_tokens": max_tokens}
            async with session.post(f"{at.v1}/chat/completions", json=body) as reply:
                assert reply.status == status
                assert ("error" in await reply.json()) == (status == 400)


def _curl(*arguments: str) -> str:
    result = subprocess.run(
        ["curl", "-sS", "--max-time", "120", *arguments], capture_output=True, text=True, check=True
    )
    return result.stdout


@cell("curl", "chat, without model or content type")
def curl_chat(at: Any) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 6})
    reply = json.loads(_curl(f"{at.v1}/chat/completions", "-d", body))
    assert reply["choices"][0]["message"]["content"]


@cell("curl", "chat stream")
def curl_stream(at: Any) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 6, "stream": True})
    reply = _curl("-N", f"{at.v1}/chat/completions", "-d", body)
    assert reply.endswith("data: [DONE]\n\n")


@cell("curl", "models, health, version, metrics")
def curl_gets(at: Any) -> None:
    assert json.loads(_curl(f"{at.v1}/models"))["data"]
    assert json.loads(_curl(f"{at.url}/health"))["status"] == "ok"
    assert json.loads(_curl(f"{at.url}/version"))["version"]
    assert "vllm:num_requests_running" in _curl(f"{at.url}/metrics")


@cell("curl", "an error is readable")
def curl_error(at: Any) -> None:
    reply = json.loads(_curl(f"{at.v1}/chat/completions", "-d", "{messages: oops"))
    assert "JSON" in reply["error"]["message"]


@cell("curl", "HEAD and OPTIONS")
def curl_head(at: Any) -> None:
    assert "200" in _curl("-I", f"{at.url}/health").splitlines()[0]
