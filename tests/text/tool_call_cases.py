"""Answers as models of each family write them, and what they mean."""

import json

from tokenizers import AddedToken

from jaxinfer.testing import byte_tokenizer
from jaxinfer.text import Tokenizer

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"type": "object"},
        },
        "required": ["city"],
    },
    "list_files": {"type": "object", "properties": {}},
    "Write-File_2": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
}
OSLO = ("get_weather", {"city": "Oslo"})
BERN = ("get_weather", {"city": "Bern", "days": 3})
LIST = ("list_files", {})
FILE = ("Write-File_2", {"path": "a.py", "text": 'print("{[<tool_call>")\n\tif x:\\n'})
_FILE_JSON = json.dumps(FILE[1])

SEP, CALL, CALL_END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# (format, text, text outside of calls, calls)
CASES = [
    ("hermes", hermes("get_weather", '{"city": "Oslo"}'), "", [OSLO]),
    (
        "hermes",
        "I'll look.\n"
        + hermes("get_weather", '{"city": "Oslo"}')
        + "\n"
        + hermes("Write-File_2", _FILE_JSON)
        + "\n",
        "I'll look.\n",
        [OSLO, FILE],
    ),
    # Hermes 2 Pro writes the arguments first.
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Bern", "days": 3}, "name": "get_weather"}</tool_call>',
        "",
        [BERN],
    ),
    ("hermes", '<tool_call>{"name": "list_files"}</tool_call>', "", [LIST]),
    ("hermes", '<tool_call>{"name": "list_files", "arguments": null}</tool_call>', "", [LIST]),
    (
        "hermes",
        '<tool_call>{"id": 7, "name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}'
        "</tool_call>done",
        "done",
        [OSLO],
    ),
    # Small models lose the last brace, or stop before the end marker.
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}\n</tool_call>',
        "",
        [OSLO],
    ),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}', "", [OSLO]),
    ("hermes", f'<tool_call>[{{"name": "list_files"}}]</tool_call>{hermes(*LIST)}', "", [LIST] * 2),
    (
        "qwen_coder",
        "<tool_call>\n<function=Write-File_2>\n<parameter=path>\na.py\n</parameter>\n"
        f"<parameter=text>\n{FILE[1]['text']}\n</parameter>\n</function>\n</tool_call>",
        "",
        [FILE],
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n"
        "<parameter=days>3</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=options>\n{"a": [1, 2]}\n</parameter>\n<parameter=more>\nTrue\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=list_files>\n</function>\n</tool_call>",
        "",
        [
            (
                "get_weather",
                {"city": "7", "days": 3, "units": None, "options": {"a": [1, 2]}, "more": True},
            ),
            LIST,
        ],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', "", [OSLO]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}};'
        ' {"name": "list_files", "parameters": {}}',
        "",
        [OSLO, LIST],
    ),
    (
        "llama3_json",
        '\n[{"name": "list_files", "arguments": {}}, {"name": "list_files", "arguments": {}}]',
        "",
        [LIST, LIST],
    ),
    (
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "a1B2c3"},'
        ' {"name": "list_files", "arguments": {}, "id": "d4E5f6"}]',
        "Sure.",
        [OSLO, LIST],
    ),
    (
        "mistral_names",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]list_files[CALL_ID]ab1[ARGS]{}',
        "",
        [OSLO, LIST],
    ),
    ("mistral_names", '[TOOL_CALLS]get_weather{"city": "Oslo"}', "", [OSLO]),
    (
        "deepseek_v3",
        f'Yes.{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}\n'
        f"{CALL}function{SEP}list_files\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "Yes.",
        [OSLO, LIST],
    ),
    (
        "deepseek",
        f'{CALLS}{CALL}get_weather{SEP}{{"city": "Oslo"}}{CALL_END}{CALL}list_files{SEP}{{}}'
        f"{CALL_END}{CALLS_END}",
        "",
        [OSLO, LIST],
    ),
    (
        "pythonic",
        "[get_weather(city='Bern', days=3), list_files()]",
        "",
        [BERN, LIST],
    ),
    (
        "pythonic",
        '<|python_start|>[get_weather(city="Oslo")]<|python_end|>',
        "",
        [OSLO],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='O\\'x', days=-1, options={'a': [True, None, 1.5],})]"
        "<|tool_call_end|>Checking.",
        "Checking.",
        [
            (
                "get_weather",
                {"city": "O'x", "days": -1, "options": {"a": [True, None, 1.5]}},
            )
        ],
    ),
]

# (format, text that only looks like a call)
NO_CALLS = [
    ("hermes", "Write <tool_call> and then JSON."),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "Oslo"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "<tool_call>{'name': 'get_weather'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "get_we'),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_ca"),
    ("hermes", "a < b, a <tool_called"),
    ("qwen_coder", "<tool_call><function=unknown></function></tool_call>"),
    ("qwen_coder", "<tool_call><function=get_weather>city</function></tool_call>"),
    ("llama3_json", '{"name": "Ada", "parameters": {"born": 1815}}'),
    ("llama3_json", '{"city": "Oslo"}'),
    ("llama3_json", '  {"name": "get_weather"'),
    ("llama3_json", 'Say {"name": "get_weather", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", "[1, 2, 3]"),
    ("mistral", '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
    ("mistral_names", "[TOOL_CALLS]get_weather[ARGS]Oslo"),
    ("deepseek", f"{CALLS}nothing{CALLS_END}"),
    ("deepseek", f"{CALLS}{CALL}get_weather{SEP}Oslo{CALL_END}{CALLS_END}"),
    ("pythonic", "[1] See the notes."),
    ("pythonic", "[get_weather(city=oslo)]"),
    ("pythonic", "[get_weather(city='Oslo'"),
    ("pythonic", "[get_weather('Oslo')]"),
    ("pythonic", "[get_weather(city=" + "[" * 100 + "]" * 100 + ")]"),
    ("pythonic", "[get_weather(city='\\ud83d')]"),
    ("pythonic", "[get_weather(days=1e999)]"),
    ("lfm2", "<|tool_call_start|>[unknown()]<|tool_call_end|>"),
]


def tokenizer_with(special, template=None):
    """A byte tokenizer with more special tokens, from id 258 on."""
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=names, chat_template=template)
