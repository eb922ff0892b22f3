"""What the fake engine is made to say about tools, and how its answers are put together."""

import copy

from server.test_tools import tool
from text.tool_call_cases import tokenizer_with

from jaxinfer.text import ChatTemplate

CHAT = "/v1/chat/completions"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}{% endif %}"
    '{# <tool_call>{"name": "x", </think> #}' + TURNS,
    "opened": '{# <tool_call>{"name": "x", </think> #}' + TURNS + "<think>\n",
    "mistral": "{# [TOOL_CALLS] #}" + TURNS,
    "deepseek": "{# <｜tool▁calls▁begin｜> #}" + TURNS,
    "llama3_json": '{# <|eot_id|> "parameters": #}' + TURNS,
}
WEATHER = tool(
    "get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}
)
TOOLS = [WEATHER, tool("list_files")]
OSLO = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
LIST = {"name": "list_files", "arguments": "{}"}


def speak(engine, template, text, special=()):
    """Gives the engine a template and what it answers with it."""
    engine.tokenizer = tokenizer_with(special, TEMPLATES[template])
    engine.chat_template = ChatTemplate.from_tokenizer(engine.tokenizer)
    engine.max_model_len = 4096
    engine.text = Tokens(engine.tokenizer.encode(text)) if special else text


class Tokens:
    """A text of the fake engine with tokens that are no bytes."""

    def __init__(self, ids):
        self._ids = ids

    def encode(self):
        return self._ids


async def ask(server, body):
    """Returns the choices of the whole answer, after checking that the stream says the same."""
    status, whole, _ = await server.post(CHAT, body)
    assert status == 200, whole
    streamed = folded(await server.chunks(CHAT, body))
    for choice, other in zip(whole["choices"], streamed, strict=True):
        message = copy.deepcopy(choice["message"])
        message = {name: value for name, value in message.items() if value is not None}
        for call in [*message.get("tool_calls", ()), *other["message"].get("tool_calls", ())]:
            assert call.pop("id").startswith("call_")
        message.setdefault("content", "")
        assert message == other["message"]
        assert choice["finish_reason"] == other["finish_reason"]
    return whole["choices"]


def folded(chunks):
    """Returns messages from deltas: strings are joined, as clients do, and calls by their index."""
    choices = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        found = choices.setdefault(choice["index"], {"message": {}, "finish_reason": None})
        fold(found["message"], choice["delta"])
        found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def fold(into, delta):
    for name, value in delta.items():
        if isinstance(value, str):
            into[name] = into.get(name, "") + value
        elif isinstance(value, dict):
            fold(into.setdefault(name, {}), value)
        else:
            for call in value:
                calls = into.setdefault(name, [])
                rest = {key: part for key, part in call.items() if key != "index"}
                if call["index"] == len(calls):
                    calls.append({})
                fold(calls[call["index"]], rest)


def calls_of(choice):
    return [call["function"] for call in choice["message"].get("tool_calls", [])]
