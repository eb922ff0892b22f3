"""/v1/responses: what its input and its parameters become, and what is refused."""

import pytest
from server.test_responses import RESPONSES, WEATHER, respond

from jaxinfer.config import ServerConfig
from jaxinfer.server.responses_protocol import parse_responses
from jaxinfer.text import ChatTemplate

INPUTS = [
    ("hi", "<user>hi"),
    ([{"role": "user", "content": "hi"}], "<user>hi"),
    (
        [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "d"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a"}],
            },
            {"type": "message", "role": "user", "content": "u"},
        ],
        "<system>d<assistant>a<user>u",
    ),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "<assistant>no"),
    ([{"role": "user", "content": []}], "<user>"),
    ([{"type": "reasoning", "summary": []}, {"role": "user", "content": "u"}], "<user>u"),
]


@pytest.mark.parametrize(("given", "prompt"), INPUTS, ids=str)
async def test_the_prompt_of_an_input(server, engine, given, prompt):
    await respond(server, {"input": given})
    assert bytes(engine.requests[-1].prompt_token_ids).decode() == f"{prompt}<assistant>"


async def test_instructions_come_first(server, engine):
    await respond(server, instructions="i")
    assert bytes(engine.requests[-1].prompt_token_ids) == b"<system>i<user>hi<assistant>"


def test_calls_and_their_outputs_are_a_chats():
    """The calls of one turn are in one message, with what was thought before."""
    call = {"type": "function_call", "name": "weather", "arguments": '{"place": "Bern"}'}
    body = {
        "input": [
            {"role": "user", "content": "q"},
            {
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "short"}],
                "content": [{"type": "reasoning_text", "text": "why"}],
                "id": "rs_1",
            },
            {"role": "assistant", "content": "wait"},
            {**call, "call_id": "c1", "id": "fc_1", "status": "completed"},
            {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "rain"}],
            },
            {**call, "call_id": "c3"},
        ],
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    call = parse_responses(body, defaults={}, vocab_size=320, config=ServerConfig())
    function = {"name": "weather", "arguments": {"place": "Bern"}}
    calls = [{"id": f"c{n}", "type": "function", "function": function} for n in (1, 2, 3)]
    rain = [{"type": "text", "text": "rain"}]
    assert call.chat.messages == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "why",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": rain},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    ]
    assert call.chat.tools.is_required
    ((tool,),) = (call.chat.tools.tools,)
    assert tool["function"] == {name: WEATHER[name] for name in WEATHER if name != "type"}
    assert call.repeated["tool_choice"] == body["tool_choice"]


def test_functions_are_strict_unless_told_otherwise():
    tool = {name: WEATHER[name] for name in WEATHER if name != "strict"}
    body = {"input": "hi", "tools": [tool]}
    call = parse_responses(body, defaults={}, vocab_size=320, config=ServerConfig())
    assert call.chat.tools.strict == {"weather"}
    assert call.repeated["tools"] == [{**tool, "strict": True}]


async def test_parameters_become_the_chats(server, engine):
    engine.chat_template = ChatTemplate("{{ reasoning_effort }}{{ enable_thinking }}")
    await respond(
        server,
        max_output_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        seed=7,
        stop=["x"],
        reasoning={"effort": "low", "summary": "auto"},
        enable_thinking=False,
        store=True,
        user="u",
        service_tier="auto",
        truncation="disabled",
        stream_options=None,
        top_logprobs=3,
        max_tool_calls=2,
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "low"},
    )
    (request,) = engine.requests
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (2, 0.5, 0.25, 3)
    assert (params.seed, params.stop, params.logprobs) == (7, ("x",), 3)
    assert bytes(request.prompt_token_ids) == b"lowFalse"


NAMED = {"type": "function", "name": "other"}
REFUSALS = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": 5}, "input", "invalid_type"),
    ({"input": []}, "input", "empty_array"),
    ({"input": ["a"]}, "input[0]", "invalid_type"),
    ({"input": [{}]}, "input[0].type", "missing_required_parameter"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
        "input[0].arguments",
        "missing_required_parameter",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
        "missing_required_parameter",
    ),
    ({"instructions": 5}, "instructions", "invalid_type"),
    ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
    ({"max_output_tokens": "9"}, "max_output_tokens", "invalid_type"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
    ({"store": "yes"}, "store", "invalid_type"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options", "invalid_value"),
    (
        {"stream_options": {"include_obfuscation": 1}, "stream": True},
        "stream_options.include_obfuscation",
        "invalid_type",
    ),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"text": {"verbosity": 5}}, "text.verbosity", "invalid_type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {}}}, "text.format.type", "invalid_type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "invalid_value"),
    ({"tools": [{**WEATHER, "strict": "yes"}]}, "tools[0].strict", "invalid_type"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice.name", "invalid_value"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "file_search"}},
        "tool_choice.type",
        "unsupported_parameter",
    ),
    (
        {
            "tools": [WEATHER],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]},
        },
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    ({"input": "x" * 400}, "input", "context_length_exceeded"),
    ({"min_tokens": 5, "max_output_tokens": 4}, "min_tokens", "invalid_value"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSALS, ids=str)
async def test_refusals(server, body, param, code):
    """Errors name parameters as they are here, not as the chat has them."""
    status, reply, _ = await server.post(RESPONSES, {"input": "hi", **body})
    error = reply["error"]
    assert (status, error["param"], error["code"]) == (400, param, code), error["message"]
    assert "messages[" not in error["message"]
    assert "max_completion_tokens" not in error["message"]
    await respond(server)


async def test_a_chat_that_the_template_refuses(server):
    """The template's message names a part of the input where it names a message."""
    item = {"type": "function_call_output", "call_id": "c", "output": "x"}
    status, reply, _ = await server.post(RESPONSES, {"input": [item]})
    assert (status, reply["error"]["param"]) == (400, "input")
    assert "no tools" in reply["error"]["message"]


async def test_unknown_names_are_refused_when_strict(start):
    server = await start(strict_params=True)
    for body in ({"imput": 1}, {"text": {"formats": 1}}, {"reasoning": {"level": 1}}):
        status, reply, _ = await server.post(RESPONSES, {"input": "hi", **body})
        assert status == 400
        assert "Unrecognized request argument" in reply["error"]["message"]
    await respond(server, model="tiny", store=False)
