"""The body of a chat request: its parameter table, and the rules for messages and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.server.constraints import RESPONSE_FORMAT
from jaxinfer.server.errors import invalid, missing, shown, unsupported
from jaxinfer.server.fields import (
    Field,
    anything,
    array,
    boolean,
    ignored,
    integer,
    json_object,
    one_of,
    read_object,
    refused,
    string,
)
from jaxinfer.server.parameters import MAX_TOKENS, SHARED, GenerationOptions, generation_options
from jaxinfer.server.tools import TOOL_FIELDS, ToolRequest, read_tools
from jaxinfer.text.chat_template import RESERVED_KWARGS
from jaxinfer.text.surrogates import refuse_surrogates

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_ROLES_SHOWN = {"developer": "system", "function": "tool"}
# Texts beside the content, and other names they go by.
_MESSAGE_TEXTS = {"name": "name", "tool_call_id": "tool_call_id", "reasoning_content": "reasoning"}
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file")


@dataclass(frozen=True)
class ChatRequest:
    """A validated chat request.

    Attributes:
      messages: as the template sees them: text or text parts, `developer` as `system`, `function`
        as `tool`.
      template_options: keyword arguments of `ChatTemplate.render`.
      tools: what the answer may call; None if nothing.
      includes_reasoning: whether the answer shows its reasoning.
      echo: what the answer's content begins with.
    """

    options: GenerationOptions
    messages: list[dict[str, Any]]
    template_options: dict[str, Any] = field(default_factory=dict)
    tools: ToolRequest | None = None
    includes_reasoning: bool = True
    echo: str = ""


def _read_modalities(value: Any, path: str) -> None:
    if array(string())(value, path) != ["text"]:
        raise unsupported(path, f"{path} must be ['text'], got {shown(value)}")


CHAT: Mapping[str, Field] = {
    **SHARED,
    "messages": Field(anything),
    "max_completion_tokens": Field(integer(1)),
    "max_tokens": Field(integer(1)),
    "logprobs": Field(boolean),
    "top_logprobs": Field(integer(0, 20)),
    "response_format": RESPONSE_FORMAT,
    **TOOL_FIELDS,
    "include_reasoning": Field(boolean),
    "modalities": ignored(_read_modalities),
    "audio": refused(),
    "web_search_options": refused(),
    "verbosity": ignored(string()),
    "reasoning_effort": Field(one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    "enable_thinking": Field(boolean),
    "chat_template": refused(
        because="is not accepted from a request; start the server with --chat-template"
    ),
    "chat_template_kwargs": Field(json_object),
    "documents": Field(array(json_object)),
    "add_generation_prompt": Field(boolean),
    "continue_final_message": Field(boolean),
    "echo": Field(boolean),
}


def parse_chat(
    body: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    vocab_size: int,
    config: ServerConfig,
) -> ChatRequest:
    """Returns the request in a JSON body.

    Raises:
      ApiError: 400; a parameter is missing, does not fit, or is not honoured.
    """
    values = read_object(body, CHAT, strict=config.strict_params)
    if "messages" not in values:
        raise missing("messages")
    messages = array(_read_message, low=1)(values["messages"], "messages")
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if max_tokens is not None:
        max_tokens = min(max_tokens, MAX_TOKENS)
    options = generation_options(
        values,
        defaults=defaults,
        vocab_size=vocab_size,
        config=config,
        max_tokens=max_tokens,
        logprobs=_logprobs(values),
    )
    return ChatRequest(
        options,
        messages,
        _template_options(values),
        tools=read_tools(values),
        includes_reasoning=values.get("include_reasoning", True),
        echo=_last_answer(messages) if values.get("echo", False) else "",
    )


def _last_answer(messages: list[dict[str, Any]]) -> str:
    """Returns the text of the last message, if that is the assistant's."""
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _logprobs(values: Mapping[str, Any]) -> int | None:
    top = values.get("top_logprobs")
    if values.get("logprobs", False):
        return 0 if top is None else int(top)
    if top is not None:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    return None


def _template_options(values: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(values.get("chat_template_kwargs", {}))
    for name in options:
        if name in RESERVED_KWARGS:
            param = "chat_template_kwargs"
            raise invalid(param, f"{param} must not set {shown(name)}: the name is reserved")
    for name in ("enable_thinking", "reasoning_effort"):
        if name in values:
            options.setdefault(name, values[name])
    options["add_generation_prompt"] = values.get(
        "add_generation_prompt", not values.get("continue_final_message", False)
    )
    options["continue_final_message"] = values.get("continue_final_message", False)
    if options["add_generation_prompt"] and options["continue_final_message"]:
        raise invalid(
            "continue_final_message",
            "continue_final_message excludes add_generation_prompt=true; set only one of them",
        )
    options["documents"] = values.get("documents")
    return options


def _read_message(value: Any, path: str) -> dict[str, Any]:
    message = json_object(value, path)
    role = message.get("role")
    if role is None:
        raise missing(f"{path}.role")
    role = one_of(*_ROLES)(role, f"{path}.role")
    read: dict[str, Any] = {"role": _ROLES_SHOWN.get(role, role)}
    calls = _read_calls(message, path)
    content = message.get("content")
    if content is not None:
        read["content"] = _read_content(content, f"{path}.content", role)
    elif role != "assistant" or not (calls or message.get("refusal")):
        raise missing(f"{path}.content")
    else:
        read["content"] = message.get("refusal") or ""
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        where = f"{path}.tool_call_id"
        raise invalid(where, f"{where} is required with role tool", "missing_required_parameter")
    for name, other_name in _MESSAGE_TEXTS.items():
        given = name if message.get(name) is not None else other_name
        if message.get(given) is not None:
            read[name] = string()(message[given], f"{path}.{given}")
    if calls is not None:
        read["tool_calls"] = calls
    return read


def _read_calls(message: Mapping[str, Any], path: str) -> list[dict[str, Any]] | None:
    """Returns a message's calls; `function_call` is the old form of a single one."""
    if message.get("tool_calls") is not None:
        calls = array(_read_tool_call)(message["tool_calls"], f"{path}.tool_calls")
        return list(calls)
    if message.get("function_call") is not None:
        function = _read_called_function(message["function_call"], f"{path}.function_call")
        return [{"type": "function", "function": function}]
    return None


def _read_content(value: Any, path: str, role: str) -> str | list[dict[str, str]]:
    """Returns the text or the text parts, which the template shows or joins as it is made to."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        message = f"{path} must be a string or an array of parts, got {shown(value)}"
        raise invalid(path, message, "invalid_type")

    def read_part(part: Any, where: str) -> dict[str, str]:
        kind = json_object(part, where).get("type")
        if kind == "text" or (kind == "refusal" and role == "assistant"):
            text = part.get(kind)
            if text is None:
                raise missing(f"{where}.{kind}")
            return {"type": "text", "text": string()(text, f"{where}.{kind}")}
        if kind in _MEDIA_PARTS:
            raise unsupported(where, f"{where} is {kind}, and this model reads text only")
        raise invalid(f"{where}.type", f"{where}.type must be text, got {shown(kind)}")

    return array(read_part, low=1)(value, path)


def _read_tool_call(value: Any, path: str) -> dict[str, Any]:
    call = json_object(value, path)
    if call.get("type") is not None:
        one_of("function")(call["type"], f"{path}.type")
    function = _read_called_function(call.get("function"), f"{path}.function")
    read = {"type": "function", "function": function}
    if call.get("id") is not None:
        read["id"] = string()(call["id"], f"{path}.id")
    return read


def _read_called_function(value: Any, path: str) -> dict[str, Any]:
    function = json_object(value, path)
    name = string()(function.get("name"), f"{path}.name")
    arguments = string()(function.get("arguments"), f"{path}.arguments")
    try:
        # Templates of model families print the arguments as JSON themselves.
        parsed = json.loads(arguments) if arguments.strip() else {}
        refuse_surrogates(json.dumps(parsed, ensure_ascii=False), "arguments")
    except (ValueError, RecursionError):
        parsed = arguments
    return {"name": name, "arguments": parsed if isinstance(parsed, dict) else arguments}
