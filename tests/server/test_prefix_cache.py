"""What clients see and steer of the prefix cache: usage, salts, and the call that clears it."""

import pytest
from server.fake_engine import chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        (CHAT, chat(), 1),
        (CHAT, chat(n=3), 1),
        (COMPLETIONS, {"prompt": "hi"}, 1),
        (COMPLETIONS, {"prompt": ["hi", "ho"], "n": 2}, 2),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}, 1),
    ],
)
async def test_usage_counts_each_prompt_once(server, engine, path, body, prompts):
    engine.num_cached = 16
    expected = {"cached_tokens": 16 * prompts}
    whole = (await server.post(path, body))[1]
    assert whole["usage"]["prompt_tokens_details"] == expected
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = await server.chunks(path, {**body, **options})
    assert chunks[-1]["usage"]["prompt_tokens_details"] == expected
    counts = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
    assert counts == sorted(counts)


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/v1/reset_prefix_cache"])
async def test_the_cache_can_be_cleared(server, engine, path):
    status, body, _ = await server.post(path, b"")
    assert (status, body) == (200, {"status": "ok"})
    assert engine.num_clears == 1
    status, body, headers = await server.get(path)
    assert (status, headers["Allow"]) == (405, "POST")


async def test_clearing_needs_the_key_and_a_ready_engine(start, engine):
    server = await start(api_key=("secret",))
    assert (await server.post("/reset_prefix_cache", b""))[0] == 401
    key = {"Authorization": "Bearer secret"}
    assert (await server.post("/reset_prefix_cache", b"", headers=key))[0] == 200
    engine.state = "dead"
    assert (await server.post("/reset_prefix_cache", b"", headers=key))[0] == 503
    assert engine.num_clears == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, {"prompt": "hi"})])
async def test_salts_reach_the_engine(server, engine, path, body):
    for salt in (None, "mine"):
        assert (await server.post(path, {**body, "cache_salt": salt}))[0] == 200
    assert [request.cache_salt for request in engine.requests] == [None, "mine"]
