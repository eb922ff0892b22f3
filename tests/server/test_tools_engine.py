"""Calls that must be made, made by a real engine: a random model has nothing else to say."""

import dataclasses
import json

import aiohttp
import pytest
from server.test_tools import tool
from tiny_engine import shared
from tiny_server import tiny_server

from jaxinfer.text import ChatTemplate

# Short, as the context is.
TEMPLATE = (
    '{% if tools %}{{ tools[0].function.name }}{% endif %}{# <tool_call>{"name": "x" #}'
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
)
COLORS = {
    "type": "object",
    "properties": {"c": {"enum": ["red", "blue"]}},
    "required": ["c"],
    "x-guidance": {"whitespace_pattern": " "},
}


@pytest.fixture
async def server(monkeypatch):
    loaded = dataclasses.replace(shared(), chat_template=ChatTemplate(TEMPLATE))
    monkeypatch.setattr("tiny_server.shared", lambda: loaded)
    async with tiny_server(monkeypatch) as server:
        yield server


@pytest.mark.parametrize("seed", range(4))
async def test_a_required_call_is_made_streamed_or_not(server, seed):
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool("paint", parameters=COLORS)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": seed,
    }
    url = f"{server.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=body) as response:
            whole = await response.json()
        async with session.post(url, json={**body, "stream": True}) as response:
            events = (await response.text()).split("\n\n")
    [choice] = whole["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["c"] in ("red", "blue")
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if "{" in event]
    pieces = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert "".join(piece["arguments"] for piece in pieces) == call["function"]["arguments"]
