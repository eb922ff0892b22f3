"""The parameters about tools: every row at and beyond its limits, and what they mean together."""

import pytest
from server.fake_engine import chat
from server.test_parameters import read_chat, refusal

from jaxinfer.server.tools import MAX_TOOLS

MISSING, TYPE, VALUE = "missing_required_parameter", "invalid_type", "invalid_value"
LONG, MANY, EMPTY = "string_above_max_length", "array_above_max_length", "empty_array"
UNSUPPORTED = "unsupported_parameter"


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


def named(name="f"):
    return {"type": "function", "function": {"name": name}}


def allowed(*names, mode="auto"):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


F = [tool()]
NAMES = ["f", "a" * 64, "A-Z_09", "-"]
BAD_NAMES = [
    ("", VALUE),
    ("a" * 65, LONG),
    ("a b", VALUE),
    ("a.b", VALUE),
    ("é", VALUE),
    ("a\n", VALUE),
    ("\u0663", VALUE),
    (5, TYPE),
    (None, MISSING),
]

# parameters -> accepted
ACCEPTED = [
    {"tools": []},
    {"tools": None, "tool_choice": None, "parallel_tool_calls": None},
    {"tool_choice": "none"},
    {"tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": [tool(f"f{number}") for number in range(MAX_TOOLS)]},
    *({"tools": [tool(name)]} for name in NAMES),
    {"tools": [tool(description="x" * 10_000, strict=True, parameters={"type": "object"})]},
    {"tools": [tool(description=None, strict=None, parameters=None)]},
    {"tools": [tool(parameters={}, strict=False)]},
    *({"tools": F, "tool_choice": choice} for choice in ("none", "auto", "required", named())),
    {"tools": [*F, tool("g")], "tool_choice": allowed("g", "f")},
    {"tools": F, "tool_choice": allowed("f", mode="required")},
    {"tools": F, "parallel_tool_calls": True},
    {"functions": [], "function_call": "auto"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"functions": [{"name": "f"}], "function_call": {"name": "f"}},
    {"functions": [{"name": f"f{number}"} for number in range(MAX_TOOLS)]},
]
# parameters -> the parameter at fault, and the code
REFUSED = [
    ({"tools": {}}, "tools", TYPE),
    ({"tools": "f"}, "tools", TYPE),
    ({"tools": [tool(f"f{number}") for number in range(MAX_TOOLS + 1)]}, "tools", MANY),
    ({"tools": ["f"]}, "tools[0]", TYPE),
    ({"tools": [None]}, "tools[0]", TYPE),
    ({"tools": [{}]}, "tools[0].type", MISSING),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", MISSING),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", TYPE),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", VALUE),
    ({"tools": [{"type": 5}]}, "tools[0].type", TYPE),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", UNSUPPORTED),
    *(({"tools": [tool(name)]}, "tools[0].function.name", code) for name, code in BAD_NAMES),
    ({"tools": [tool(), tool("g"), tool()]}, "tools[2].function.name", VALUE),
    ({"tools": [tool(description=5)]}, "tools[0].function.description", TYPE),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", TYPE),
    *(
        ({"tools": [tool(parameters=value)]}, "tools[0].function.parameters", TYPE)
        for value in ([], "x", 5, True, 0, "", False)
    ),
    (
        {"tools": [tool(parameters={"type": "string"})]},
        "tools[0].function.parameters.type",
        VALUE,
    ),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": named(), "tools": []}, "tool_choice", VALUE),
    ({"tool_choice": allowed("f")}, "tool_choice", VALUE),
    ({"tools": F, "tool_choice": "any"}, "tool_choice", VALUE),
    ({"tools": F, "tool_choice": True}, "tool_choice", TYPE),
    ({"tools": F, "tool_choice": {}}, "tool_choice.type", MISSING),
    ({"tools": F, "tool_choice": {"type": "tool"}}, "tool_choice.type", VALUE),
    ({"tools": F, "tool_choice": {"type": "custom"}}, "tool_choice.type", UNSUPPORTED),
    ({"tools": F, "tool_choice": {"type": "function"}}, "tool_choice.function", TYPE),
    ({"tools": F, "tool_choice": named("g")}, "tool_choice.function.name", VALUE),
    *(
        ({"tools": F, "tool_choice": named(name)}, "tool_choice.function.name", code)
        for name, code in BAD_NAMES
    ),
    ({"tools": F, "tool_choice": allowed()}, "tool_choice.allowed_tools.tools", EMPTY),
    (
        {"tools": F, "tool_choice": allowed("f", "g")},
        "tool_choice.allowed_tools.tools[1].function.name",
        VALUE,
    ),
    (
        {"tools": F, "tool_choice": allowed("f", mode="none")},
        "tool_choice.allowed_tools.mode",
        VALUE,
    ),
    ({"tools": F, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", TYPE),
    ({"tools": F, "parallel_tool_calls": "no"}, "parallel_tool_calls", TYPE),
    ({"tools": F, "parallel_tool_calls": 0}, "parallel_tool_calls", TYPE),
    ({"functions": {}}, "functions", TYPE),
    ({"functions": [{}]}, "functions[0].name", MISSING),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name", VALUE),
    ({"functions": [{"name": "f"}] * (MAX_TOOLS + 1)}, "functions", MANY),
    ({"functions": [{"name": "f"}], "tools": F}, "functions", VALUE),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", VALUE),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name", VALUE),
    ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name", MISSING),
    ({"functions": [{"name": "f"}], "function_call": 5}, "function_call", TYPE),
    ({"function_call": {"name": "f"}}, "function_call", VALUE),
    ({"include_reasoning": "no"}, "include_reasoning", TYPE),
]


@pytest.mark.parametrize("parameters", ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_is_accepted(parameters):
    read_chat(parameters)


@pytest.mark.parametrize(
    ("parameters", "param", "code"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_is_refused(parameters, param, code):
    error = refusal(read_chat, parameters)
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]


def names(request):
    return None if request is None else [each["function"]["name"] for each in request.tools]


@pytest.mark.parametrize(
    ("parameters", "chosen", "is_required", "only_one"),
    [
        ({}, ["f", "g"], False, False),
        ({"tool_choice": "none"}, None, None, None),
        ({"parallel_tool_calls": False}, ["f", "g"], False, True),
        ({"tool_choice": "required"}, ["f", "g"], True, False),
        ({"tool_choice": named("g")}, ["g"], True, True),
        ({"tool_choice": allowed("g")}, ["g"], False, False),
        ({"tool_choice": allowed("g", "g", mode="required")}, ["g"], True, False),
    ],
)
def test_what_may_be_called(parameters, chosen, is_required, only_one):
    request = read_chat({"tools": [tool(), tool("g")], **parameters}).tools
    assert names(request) == chosen
    if request is not None:
        assert (request.is_required, request.only_one) == (is_required, only_one)
        assert not request.is_legacy


def test_functions_are_tools_of_which_one_may_be_called():
    functions = [{"name": "f", "description": "d"}, {"name": "g"}]
    request = read_chat({"functions": functions}).tools
    assert (names(request), request.is_required) == (["f", "g"], False)
    assert request.only_one
    assert request.is_legacy
    request = read_chat({"functions": functions, "function_call": {"name": "g"}}).tools
    assert (names(request), request.is_required) == (["g"], True)


def test_what_a_template_gets_of_a_tool():
    given = tool(parameters=None, description=None, other=5)
    [read] = read_chat({"tools": [given]}).tools.tools
    parameters = {"type": "object", "properties": {}}
    assert read == {"type": "function", "function": {"name": "f", "parameters": parameters}}
    request = read_chat({"tools": [tool(strict=True), tool("g", strict=False), tool("h")]}).tools
    assert request.strict == {"f"}
    assert request.schemas["g"] == parameters


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def calling(**changes):
    return [{"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (calling(type="custom"), "messages[0].tool_calls[0].type"),
        (calling(function=None), "messages[0].tool_calls[0].function"),
        (calling(function={"arguments": ""}), "messages[0].tool_calls[0].function.name"),
        (
            calling(function={"name": "f", "arguments": {}}),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (calling(id=5), "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call.name"),
        ([{"role": "function", "name": "f"}], "messages[0].content"),
    ],
)
def test_bad_calls_in_messages_are_refused_by_path(messages, param):
    assert refusal(read_chat, {"messages": messages})["param"] == param


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ("", {}),
        (" ", {}),
        ("[1]", "[1]"),
        ("not JSON", "not JSON"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
    ids=lambda value: str(value)[:12],
)
def test_arguments_are_objects_where_they_can_be(arguments, read):
    messages = calling(function={"name": "f", "arguments": arguments})
    [message] = read_chat({"messages": messages}).messages
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


def test_old_forms_of_messages():
    given = [
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": "x", "reasoning": "hm"},
    ]
    call, result, thought = read_chat({"messages": given}).messages
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert result == {"role": "tool", "name": "f", "content": "1"}
    assert thought["reasoning_content"] == "hm"


async def test_a_normal_request_is_answered_right_after(server, engine):
    engine.max_model_len = 4096
    for parameters, param, _ in REFUSED[::7]:
        status, body, _ = await server.post("/v1/chat/completions", chat(**parameters))
        assert (status, body["error"]["param"]) == (400, param)
    assert (await server.post("/v1/chat/completions", chat(tools=F)))[0] == 200
