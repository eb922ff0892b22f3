"""What requests with tools make of an answer's grammar, and OpenAI's client making them."""

import json

import pytest
from server.fake_engine import chat
from server.test_tools import named, tool
from server.tool_answers import CHAT, OSLO, TOOLS, ask, speak
from text.tool_call_cases import hermes

from jaxinfer.sampling_params import InvalidParameter


@pytest.fixture(autouse=True)
def _speak(engine):
    speak(engine, "hermes", "x")


async def grammar_of(server, engine, **parameters):
    status, body, _ = await server.post(CHAT, chat(**parameters))
    assert status == 200, body
    return engine.requests[-1].params.grammar


async def test_there_is_one_where_calls_must_be_right(server, engine):
    assert await grammar_of(server, engine, tools=TOOLS) is None
    grammar = await grammar_of(server, engine, tools=TOOLS, tool_choice="required")
    assert (grammar.kind, grammar.param) == ("lark", "tools")
    assert "list_files" in grammar.value
    grammar = await grammar_of(server, engine, tools=TOOLS, tool_choice=named("get_weather"))
    assert "list_files" not in grammar.value
    assert await grammar_of(server, engine, tools=[tool(strict=True)]) is not None
    none = await grammar_of(server, engine, tools=[tool(strict=True)], tool_choice="none")
    assert none is None


async def test_calls_or_the_format(server, engine):
    json_object = {"response_format": {"type": "json_object"}}
    grammar = await grammar_of(server, engine, tools=TOOLS, **json_object)
    assert (grammar.kind, grammar.param) == ("lark", "response_format")
    assert "list_files" in grammar.value
    assert "other: %json" in grammar.value
    required = await grammar_of(server, engine, tools=TOOLS, tool_choice="required", **json_object)
    assert "other" not in required.value
    none = await grammar_of(server, engine, tools=TOOLS, tool_choice="none", **json_object)
    assert "list_files" not in none.value


async def test_a_grammar_of_the_clients_own_excludes_tools(server, engine):
    lark = 'start: "a"'
    status, body, _ = await server.post(CHAT, chat(tools=TOOLS, guided_grammar=lark))
    assert (status, body["error"]["param"]) == (400, "guided_grammar")
    grammar = await grammar_of(server, engine, guided_grammar=lark)
    assert grammar.value == lark


async def test_a_format_is_that_of_the_text_after_reasoning(server, engine):
    json_object = {"response_format": {"type": "json_object"}}
    for template, start in (("opened", "thought gap body"), ("hermes", '("<think>" thought')):
        speak(engine, template, 'Hm.</think>{"a": 1}' if template == "opened" else '{"a": 1}')
        [choice] = await ask(server, chat(**json_object))
        assert choice["message"]["content"] == '{"a": 1}'
        grammar = engine.requests[-1].params.grammar
        assert f"start: {start}" in grammar.value
    # What a grammar of the client's own says of reasoning is not known: all of it is text.
    speak(engine, "opened", "Hm.</think>")
    [choice] = await ask(server, chat(guided_grammar='start: "Hm.</think>"'))
    assert choice["message"]["content"] == "Hm.</think>"


async def test_a_schema_that_cannot_be_used_is_a_400(server, engine):
    engine.refusal = InvalidParameter("tools", "tools cannot be used: why")
    status, body, _ = await server.post(CHAT, chat(tools=TOOLS, tool_choice="required"))
    assert (status, body["error"]["param"]) == (400, "tools")


async def test_create(client, engine):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]))
    reply = await client.chat.completions.create(
        model="tiny", messages=chat()["messages"], tools=TOOLS
    )
    [call] = reply.choices[0].message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert reply.choices[0].message.content is None


async def test_the_accumulating_helper(client, engine):
    text = f"<think>Hm.</think>Two:\n{hermes('get_weather', OSLO['arguments'])}"
    speak(engine, "hermes", f"{text}\n{hermes('list_files', '{}')}")
    async with client.chat.completions.stream(
        model="tiny", messages=chat()["messages"], tools=TOOLS, n=2
    ) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Two:\n"
        assert choice.message.reasoning_content == "Hm."
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["get_weather", "list_files"]
        assert [call.function.arguments for call in calls] == [OSLO["arguments"], "{}"]
        assert len({call.id for call in calls}) == 2
        assert all(len(call.id) == 29 for call in calls)


async def test_a_round_with_a_result(client, engine):
    speak(engine, "hermes", hermes("get_weather", OSLO["arguments"]))
    messages = chat()["messages"]
    first = await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5 C"}
    engine.text = "It is 5 C."
    second = await client.chat.completions.create(
        model="tiny", messages=[*messages, message, result], tools=TOOLS
    )
    assert second.choices[0].message.content == "It is 5 C."
    prompt = bytes(engine.requests[-1].prompt_token_ids).decode()
    assert "<tool_call>" in prompt
    assert "<tool_response>\n5 C" in prompt
