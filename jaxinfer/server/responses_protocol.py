"""The body of a request for a response, read as the chat it stands for.

What a parameter means is the chat's business: here it gets the name and the form it has there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.server.constraints import FORMATS
from jaxinfer.server.errors import ApiError, invalid, missing, unsupported
from jaxinfer.server.fields import (
    Field,
    array,
    boolean,
    described,
    ignored,
    integer,
    json_object,
    one_of,
    read_object,
    refused,
    string,
)
from jaxinfer.server.parameters import SHARED
from jaxinfer.server.protocol_chat import CHAT, ChatRequest, parse_chat
from jaxinfer.server.responses_input import read_input, read_kind
from jaxinfer.server.tools import TOOL_CHOICE_SCHEMA

_LOGPROBS = "message.output_text.logprobs"
_NO_STORE = "is not supported: this server keeps no responses; send the whole conversation as input"
_FUNCTION = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
}
_TEXT = {"verbosity": Field(string()), "format": Field(json_object)}
_REASONING = {
    "effort": CHAT["reasoning_effort"],
    "summary": Field(one_of("auto", "concise", "detailed")),
    "generate_summary": ignored(one_of("auto", "concise", "detailed")),
}
_STREAM_OPTIONS = {"include_obfuscation": ignored(boolean)}


@described(_FUNCTION)
def _read_tool(value: Any, path: str) -> dict[str, Any]:
    """Returns a function in the chat's form."""
    tool = json_object(value, path)
    kind = read_kind(tool, path)
    if kind != "function":
        message = f"{path}.type {kind} is not supported: this server offers functions only"
        raise unsupported(f"{path}.type", message)
    strict = tool.get("strict")
    function = {name: tool.get(name) for name in ("name", "description", "parameters")}
    return {"type": "function", "function": {**function, "strict": strict is None or strict}}


@described(TOOL_CHOICE_SCHEMA)
def _read_tool_choice(value: Any, path: str) -> Any:
    """Returns the choice in the chat's form."""
    if not isinstance(value, dict):
        return value
    kind = read_kind(value, path)
    if kind == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if kind != "allowed_tools":
        message = f"{path}.type {kind} is not supported: this server offers functions only"
        raise unsupported(f"{path}.type", message)

    def read(tool: Any, where: str) -> dict[str, Any]:
        named = json_object(tool, where)
        return {"type": named.get("type"), "function": {"name": named.get("name")}}

    tools = array(read)(value.get("tools"), f"{path}.tools")
    return {"type": kind, "allowed_tools": {"mode": value.get("mode"), "tools": tools}}


_OWN: Mapping[str, Field] = {
    "input": Field(
        described(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}, "minItems": 1},
                ]
            }
        )(lambda value, path: value)
    ),
    "instructions": Field(string()),
    "max_output_tokens": Field(integer(1)),
    "max_tool_calls": ignored(integer(1)),
    "top_logprobs": Field(integer(0, 20)),
    "tools": Field(array(_read_tool)),
    "tool_choice": Field(_read_tool_choice),
    "text": Field(json_object),
    "reasoning": Field(json_object),
    "include": Field(
        array(
            one_of(
                _LOGPROBS,
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
            )
        )
    ),
    "stream_options": Field(json_object),
    "store": ignored(boolean),
    "previous_response_id": refused(because=_NO_STORE),
    "conversation": refused(because=_NO_STORE),
    "background": refused(False, because="is not supported: this server keeps no responses"),
    "truncation": refused("disabled", because="must be 'disabled'; shorten the input yourself"),
    "prompt": refused(because="is not supported: this server keeps no prompts"),
    "context_management": refused([]),
    "n": refused(1, because="must be 1: a response has one output"),
    "return_token_ids": refused(False, because="is not offered here; use /v1/chat/completions"),
    "prompt_logprobs": refused(because="is not offered here; use /v1/chat/completions"),
}
_OF_CHATS = (
    "parallel_tool_calls",
    "chat_template_kwargs",
    "enable_thinking",
    "include_reasoning",
    "documents",
)
RESPONSES: Mapping[str, Field] = {**SHARED, **{name: CHAT[name] for name in _OF_CHATS}, **_OWN}
"""The parameters; those that are not its own are a chat's."""


@dataclass(frozen=True)
class ResponsesRequest:
    """A validated request for a response.

    Attributes:
      chat: the chat it stands for.
      sources: where each message of the chat comes from.
      repeated: what of the request the response repeats.
    """

    chat: ChatRequest
    sources: Sequence[str]
    repeated: Mapping[str, Any]


def parse_responses(
    body: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    config: ServerConfig,
) -> ResponsesRequest:
    """Returns the request in a JSON body.

    Raises:
      ApiError: 400; a parameter is missing, does not fit, or is not honoured.
    """
    strict = config.strict_params
    values = read_object(body, RESPONSES, strict=strict)
    if "input" not in values:
        raise missing("input")
    if "stream_options" in values:
        if not values.get("stream", False):
            raise invalid("stream_options", "stream_options needs stream=true")
        _read_within(values, "stream_options", _STREAM_OPTIONS, strict)
    text = _read_within(values, "text", _TEXT, strict)
    reasoning = _read_within(values, "reasoning", _REASONING, strict)
    messages, sources = read_input(values["input"], values.get("instructions"))
    chat = {name: body[name] for name in RESPONSES if name in body and name not in _OWN}
    chat |= {
        "messages": messages,
        "max_completion_tokens": values.get("max_output_tokens"),
        "tools": values.get("tools"),
        "tool_choice": values.get("tool_choice"),
        "response_format": _response_format(text),
        "reasoning_effort": reasoning.get("effort"),
        "verbosity": text.get("verbosity"),
        **_logprobs(values),
    }
    try:
        request = parse_chat(chat, defaults=defaults, vocab_size=vocab_size, config=config)
    except ApiError as error:
        raise renamed(error, sources) from None
    return ResponsesRequest(request, sources, _repeated(body, text, reasoning))


def _read_within(
    values: Mapping[str, Any], name: str, table: Mapping[str, Field], strict: bool
) -> dict[str, Any]:
    """Returns the parameters inside of one, which errors name with it."""
    try:
        return read_object(values.get(name, {}), table, strict=strict)
    except ApiError as error:
        about = error.body["error"]
        if about["param"] is not None:
            path = f"{name}.{about['param']}"
            about["message"] = about["message"].replace(about["param"], path, 1)
            about["param"] = path
        raise


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `text.format` in the chat's form."""
    given = text.get("format")
    if given is None:
        return None
    kind = one_of(*FORMATS)(given.get("type"), "text.format.type")
    if kind != "json_schema":
        return {"type": kind}
    names = ("name", "schema", "strict", "description")
    return {"type": kind, kind: {name: given[name] for name in names if name in given}}


def _logprobs(values: Mapping[str, Any]) -> dict[str, Any]:
    top = values.get("top_logprobs", 0)
    if not top and _LOGPROBS not in values.get("include", ()):
        return {}
    return {"logprobs": True, "top_logprobs": top}


def _repeated(
    body: Mapping[str, Any], text: Mapping[str, Any], reasoning: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what of a valid body the response repeats, in the order of OpenAI's reference."""
    tools = [{"strict": True, **tool} for tool in body.get("tools") or ()]
    given = {name: value for name, value in body.items() if value is not None}
    return {
        "background": False,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": False,  # whatever was asked for: it is not kept
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": tools,
        "truncation": "disabled",
        "user": given.get("user"),
    }


_RENAMED = (
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\btool_choice\.(allowed_tools\.)?", "tool_choice."),
    (r"\b(tool_choice)\.function\b", r"\1"),
    (r"\b(tool_choice\.tools\[\d+\])\.function\b", r"\1"),
)


def renamed(error: ApiError, sources: Sequence[str]) -> ApiError:
    """Returns an error about the chat as one about the request that stands for it."""

    def fix(text: str) -> str:
        text = re.sub(r"\bmessages\[(\d+)\]", lambda found: sources[int(found[1])], text)
        for pattern, name in _RENAMED:
            text = re.sub(pattern, name, text)
        return text

    about = error.body["error"]
    about["message"] = fix(about["message"])
    if about["param"] is not None:
        about["param"] = "input" if about["param"] == "messages" else fix(about["param"])
    return error
