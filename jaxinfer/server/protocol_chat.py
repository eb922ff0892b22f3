"""The body of a chat request: its parameter table, and the rules for messages and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.server.errors import invalid, shown, unsupported
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
from jaxinfer.text.chat_template import RESERVED_KWARGS

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio_url", "video_url", "file")


@dataclass(frozen=True)
class ChatRequest:
    """A validated chat request.

    Attributes:
      messages: as the template sees them: text or text parts, `developer` as `system`.
      template_options: keyword arguments of `ChatTemplate.render`.
    """

    options: GenerationOptions
    messages: list[dict[str, Any]]
    template_options: dict[str, Any] = field(default_factory=dict)


def _read_response_format(value: Any, path: str) -> None:
    kind = json_object(value, path).get("type")
    if kind == "text":
        return
    if kind in ("json_object", "json_schema"):
        message = f"{path} {kind} needs constrained decoding, which this server does not offer yet"
        raise unsupported(path, message)
    raise invalid(f"{path}.type", f"{path}.type must be text, json_object or json_schema")


def _read_modalities(value: Any, path: str) -> None:
    if array(string())(value, path) != ["text"]:
        raise unsupported(path, f"{path} must be ['text'], got {shown(value)}")


_TOOLS_LATER = "needs tool calling, which this server does not offer yet"

CHAT: Mapping[str, Field] = {
    **SHARED,
    "messages": Field(anything),
    "max_completion_tokens": Field(integer(1)),
    "max_tokens": Field(integer(1)),
    "logprobs": Field(boolean),
    "top_logprobs": Field(integer(0, 20)),
    "response_format": ignored(_read_response_format),
    "tools": refused([], because=_TOOLS_LATER),
    "tool_choice": refused("none", "auto", because=_TOOLS_LATER),
    "parallel_tool_calls": ignored(boolean),
    "functions": refused([], because=_TOOLS_LATER),
    "function_call": refused("none", "auto", because=_TOOLS_LATER),
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
    "echo": refused(False),
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
        raise invalid("messages", "messages is required", "missing_required_parameter")
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
    return ChatRequest(options, messages, _template_options(values))


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
        raise invalid(f"{path}.role", f"{path}.role is required", "missing_required_parameter")
    role = one_of(*_ROLES)(role, f"{path}.role")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    tool_calls = message.get("tool_calls")
    if content is not None:
        read["content"] = _read_content(content, f"{path}.content", role)
    elif role != "assistant" or not (tool_calls or message.get("refusal")):
        where = f"{path}.content"
        raise invalid(where, f"{where} is required", "missing_required_parameter")
    else:
        read["content"] = message.get("refusal") or ""
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        where = f"{path}.tool_call_id"
        raise invalid(where, f"{where} is required with role tool", "missing_required_parameter")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            read[name] = string()(message[name], f"{path}.{name}")
    if tool_calls is not None:
        read["tool_calls"] = array(_read_tool_call)(tool_calls, f"{path}.tool_calls")
    return read


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
                name = f"{where}.{kind}"
                raise invalid(name, f"{name} is required", "missing_required_parameter")
            return {"type": "text", "text": string()(text, f"{where}.{kind}")}
        if kind in _MEDIA_PARTS:
            raise unsupported(where, f"{where} is {kind}, and this model reads text only")
        raise invalid(f"{where}.type", f"{where}.type must be text, got {shown(kind)}")

    return array(read_part, low=1)(value, path)


def _read_tool_call(value: Any, path: str) -> dict[str, Any]:
    call = json_object(value, path)
    function = json_object(call.get("function"), f"{path}.function")
    name = string()(function.get("name"), f"{path}.function.name")
    arguments = string()(function.get("arguments"), f"{path}.function.arguments")
    try:
        # Templates of model families print the arguments as JSON themselves.
        parsed = json.loads(arguments)
    except ValueError:
        parsed = arguments
    read = {"type": "function", "function": {"name": name, "arguments": parsed}}
    if call.get("id") is not None:
        read["id"] = string()(call["id"], f"{path}.id")
    return read
