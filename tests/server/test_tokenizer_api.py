"""/tokenize and /detokenize in the dialects of vLLM and of llama.cpp."""

import pytest
from server.fake_engine import chat

TOKENIZE = "/tokenize"
BOS = 256


async def tokens(server, **body):
    status, reply, _ = await server.post(TOKENIZE, body)
    assert status == 200, reply
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == 256
    return reply["tokens"]


async def test_special_tokens_by_dialect(server):
    """Left to itself, vLLM adds them and llama.cpp does not."""
    added = await tokens(server, prompt="hi", add_special_tokens=True)
    assert await tokens(server, prompt="hi") == added
    assert await tokens(server, content="hi", add_special=True) == added
    plain = await tokens(server, content="hi")
    assert plain == [104, 105]
    assert await tokens(server, prompt="hi", add_special_tokens=False) == plain
    assert await tokens(server, content="", parse_special=True) == []


async def test_a_chat_is_rendered(server):
    assert bytes(await tokens(server, **chat("hi"))).decode() == "<user>hi<assistant>"
    without = await tokens(server, **chat("hi"), add_generation_prompt=False)
    assert bytes(without).decode() == "<user>hi"
    continued = await tokens(
        server,
        messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        continue_final_message=True,
    )
    assert bytes(continued).decode() == "<user>q<assistant>a"


async def test_a_chat_has_the_ids_it_is_answered_for(server, engine):
    ids = await tokens(server, **chat("hi"))
    await server.post("/v1/chat/completions", chat("hi"))
    assert list(engine.requests[-1].prompt_token_ids) == ids


async def test_pieces_and_strings(server):
    """Bytes that are no whole characters are numbers, as llama.cpp writes them."""
    pieces = await tokens(server, content="aü", with_pieces=True)
    assert pieces == [
        {"id": 97, "piece": "a"},
        {"id": 195, "piece": [195]},
        {"id": 188, "piece": [188]},
    ]
    _, reply, _ = await server.post(TOKENIZE, {"prompt": "a", "return_token_strs": True})
    assert reply["token_strs"][-1] == "a"


async def test_there_and_back(server):
    text = "grüße 🙂\n"
    ids = await tokens(server, prompt=text, add_special_tokens=False)
    status, reply, _ = await server.post("/detokenize", {"tokens": ids})
    assert (status, reply) == (200, {"prompt": text, "content": text})


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": "a", **chat()}, "prompt", "missing_required_parameter"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"content": 5}, "content", "invalid_type"),
        ({"content": "a", "parse_special": False}, "parse_special", "unsupported_parameter"),
        ({"content": "a", "with_pieces": 1}, "with_pieces", "invalid_type"),
    ],
    ids=str,
)
async def test_refusals(server, body, param, code):
    status, reply, _ = await server.post(TOKENIZE, body)
    error = reply["error"]
    assert (status, error["param"], error["code"]) == (400, param, code), error["message"]
    assert await tokens(server, content="a") == [97]


async def test_a_chat_that_the_template_refuses(server):
    message = {"role": "tool", "tool_call_id": "1", "content": "x"}
    status, reply, _ = await server.post(TOKENIZE, {"messages": [message]})
    assert (status, reply["error"]["param"]) == (400, "messages")
