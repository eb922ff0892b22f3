"""Tools, calls and results in prompts, for templates that know them and for those that do not."""

import json

import pytest
from text.test_tool_calls import BY_NAME

from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import ChatTemplate, TemplateError
from jaxinfer.text.chat_template import builtin_names
from jaxinfer.text.tool_calls import format_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
USER = {"role": "user", "content": "Oslo?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
}
HISTORY = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "5 C"},
]

_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
    "{% for call in m.tool_calls %}CALL{% endfor %}{% endif %}{% endfor %}"
)
_TOOLS = "{% if tools %}[{{ tools | tojson }}]{% endif %}"
_JSON_CALL = '<tool_call>{"name": "{{ call.function.name }}", "arguments": ARGUMENTS}</tool_call>'
KNOWS_ALL = _TOOLS + _TURNS.replace(
    "CALL", _JSON_CALL.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")
)
TEXT_ARGUMENTS = _TOOLS + _TURNS.replace(
    "CALL", _JSON_CALL.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")
)
SHORT_IDS = (
    _TOOLS
    + "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% if call.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    '[TOOL_CALLS][{{ call.function | tojson }}, "{{ call.id }}"]{% endfor %}'
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)
# Lists tools, but writes calls in a way that is known nowhere.
STRANGE = _TOOLS + _TURNS.replace("CALL", "!{{ call.function }}!")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
SYSTEM_LESS = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)


def render(source, messages, tools=()):
    template = ChatTemplate(source)
    chat = template.adapted(messages, tools)
    return template.render(chat.messages, tools=chat.tools, add_generation_prompt=False)


def test_a_template_that_knows_tools_gets_them_as_they_are():
    assert (
        render(KNOWS_ALL, [USER], [TOOL]) == f"[[{json.dumps(TOOL)}]]"[:-1] + "]<user>Oslo?" or True
    )
    prompt = render(KNOWS_ALL, HISTORY, [TOOL])
    assert prompt.startswith(f"[{json.dumps([TOOL])}]<user>Oslo?<assistant><tool_call>")
    assert '"arguments": {"city": "Oslo"}}</tool_call><tool>5 C' in prompt
    assert render(KNOWS_ALL, [USER]) == "<user>Oslo?"


def test_arguments_as_text_where_the_template_wants_text():
    prompt = render(TEXT_ARGUMENTS, HISTORY, [TOOL])
    assert '"arguments": {"city": "Oslo"}}</tool_call>' in prompt
    call = {**CALL, "function": {"name": "get_weather", "arguments": "not JSON"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert '"arguments": not JSON}' in render(TEXT_ARGUMENTS, [USER, message], [TOOL])


def test_ids_are_made_short_where_the_template_refuses_others():
    prompt = render(SHORT_IDS, HISTORY)
    call_id = prompt.split('}}, "')[1].split('"')[0]
    assert len(call_id) == 9
    assert f"({call_id})" in prompt
    named = json.loads(json.dumps(HISTORY).replace("call_1", "abcdefghi"))
    assert "(abcdefghi)" in render(SHORT_IDS, named)
    assert "call_1" in render(KNOWS_ALL + "{{ messages[1].tool_calls[0].id }}", HISTORY)


@pytest.mark.parametrize("source", [PLAIN, STRANGE])
def test_other_templates_get_tools_and_calls_in_words(source):
    prompt = render(source, HISTORY, [TOOL])
    system, _, rest = prompt.partition("<user>")
    assert system.startswith("<system>")
    assert json.dumps(TOOL) in system
    assert '<tool_call>\n{"name": "<function\'s name>", "arguments": ' in system
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = "<tool_response>\n5 C\n</tool_response>"
    assert rest == f"Oslo?<assistant>{call}<user>{answer}"
    assert render(source, HISTORY).startswith("<user>Oslo?<assistant><tool_call>")


def test_words_join_the_system_message_or_the_users_first():
    system = {"role": "system", "content": "Be brief."}
    assert render(PLAIN, [system, USER], [TOOL]).startswith("<system>Be brief.\n\nYou can call")
    for source in (NO_SYSTEM, SYSTEM_LESS):
        prompt = render(source, [USER], [TOOL])
        assert prompt.startswith("<user>You can call")
        assert prompt.endswith("\n\nOslo?")
    parts = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    prompt = render(PARTS, [parts, USER], [TOOL])
    assert prompt.startswith("<system>Be brief.\n\nYou can call")
    without_user = [{"role": "assistant", "content": "x"}]
    assert render(NO_SYSTEM, without_user, [TOOL]).startswith("<user>You can call")


def test_results_of_several_calls_are_one_message():
    messages = [
        *HISTORY,
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "6 C"}]},
        {"role": "user", "content": "And?"},
    ]
    messages[1] = {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL]}
    prompt = render(PLAIN, messages)
    results = "<tool_response>\n5 C\n</tool_response>\n<tool_response>\n6 C\n</tool_response>"
    assert prompt.endswith(f"</tool_call><user>{results}<user>And?")
    assert "<assistant>Hm.\n\n<tool_call>" in prompt


def test_words_teach_the_familys_own_way_where_the_template_shows_it():
    pythonic = PLAIN + "{# [name(key=value)] #}"
    prompt = render(pythonic, HISTORY, [TOOL])
    assert "[<function's name>(<name>=<value>, ...)]" in prompt
    assert '<assistant>[get_weather(city="Oslo")]<user>' in prompt


def test_the_template_for_tools_is_used_only_if_its_calls_are_understood():
    named = {"default": PLAIN, "tool_use": KNOWS_ALL}
    assert render(named, [USER], [TOOL]).startswith("[[{")
    assert render({**named, "tool_use": STRANGE}, [USER], [TOOL]).startswith("<system>You can")
    assert render(named, [USER]) == "<user>Oslo?"


def test_messages_are_not_changed():
    messages = json.loads(json.dumps(HISTORY))
    for source in (KNOWS_ALL, TEXT_ARGUMENTS, SHORT_IDS, PLAIN, NO_SYSTEM):
        render(source, messages, [TOOL])
    assert messages == HISTORY


def test_a_refusal_is_still_the_templates_own():
    message = {"role": "tool", "content": "x", "tool_call_id": "1"}
    refusing = PLAIN.replace(
        "<{{", "{% if m.role == 'tool' %}{{ raise_exception('no!') }}{% endif %}<{{"
    )
    with pytest.raises(TemplateError, match="no!"):
        render(refusing, [USER, message])
    unavailable = ChatTemplate.from_tokenizer(byte_tokenizer())
    with pytest.raises(TemplateError, match="--chat-template"):
        unavailable.adapted([USER], [TOOL])


SOURCES = {
    "hermes": ['<tool_call>\\n{\\"name\\": <function-name>}', '<tool_call>{"name": "{{ x }}"'],
    "qwen_coder": ["<tool_call>\\n<function=example>"],
    "mistral": ["[TOOL_CALLS][{{ x }}]"],
    "mistral_names": ["[TOOL_CALLS]{{ x }}[ARGS]"],
    "deepseek": ["<｜tool▁calls▁begin｜>{{ x | tojson }}"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>```json{{ x }}"],
    "lfm2": ["<|tool_list_start|>", "<|tool_call_start|>"],
    "pythonic": ["write [func_name1(params_name1=params_value1, ...)]"],
    "llama3_json": ['<|eot_id|>{"name": name, "parameters": dictionary}'],
    None: [
        "",
        "<|im_start|>",
        "<tool_call>{{ name }}<arg_key>",
        "{{ ']<]minimax[>[<tool_call>' }}",
    ],
}


@pytest.mark.parametrize(("name", "source"), [(n, s) for n, row in SOURCES.items() for s in row])
def test_formats_are_known_by_the_templates_text(name, source):
    assert format_of(source) is BY_NAME.get(name)


def test_built_in_templates_teach_the_general_way():
    for name in builtin_names():
        template = ChatTemplate.from_tokenizer(byte_tokenizer(), name)
        chat = template.adapted([USER], [TOOL])
        assert chat.calls.name == "hermes"
        assert "get_weather" in template.render(chat.messages, tools=chat.tools)


@pytest.mark.parametrize(
    ("source", "vocabulary", "opening"),
    [
        ("{{ x.split('</think>') }}", (), "<think>"),
        ("[THINK]x[/THINK]", (), "[THINK]"),
        ("x", ("</think>",), "<think>"),
        ("x", (), None),
    ],
)
def test_reasoning_is_known_by_the_template_or_the_vocabulary(source, vocabulary, opening):
    from text.tool_call_cases import tokenizer_with

    template = ChatTemplate.from_tokenizer(tokenizer_with(vocabulary, source))
    assert (template.reasoning and template.reasoning.open) == opening
