"""Tools in prompts: for templates that show them, and for those that know nothing of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jaxinfer.text.tool_calls.formats import HERMES, CallFormat

Chat = Sequence[Mapping[str, Any]]

_INSTRUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one:
<tools>
{tools}
</tools>
Call a function only where it helps to answer. To call one, write exactly this, with the \
function's name and with arguments that fit its parameters:
{call}
The result is then given to you. Never make up a result."""

_PLACEHOLDERS = {False: "<arguments as a JSON object>", True: "<name>=<value>, ..."}
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")
_USER = {"role": "user", "content": "probe-question"}
_PROBE = "probe_function"
_PARAMETERS = {
    "type": "object",
    "properties": {"probe_key": {"type": "string", "description": "probe"}},
    "required": ["probe_key"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "probe", "parameters": _PARAMETERS},
}


@dataclass(frozen=True)
class ToolSupport:
    """What a chat template makes of tools, of calls and of their results.

    Attributes:
      shows_tools: it lists the tools it is given.
      shows_calls: it shows calls of earlier turns.
      shows_system: it shows a system message.
      text_arguments: it wants arguments as JSON text, not as an object.
      short_ids: it refuses ids of calls that are not nine letters and digits.
    """

    shows_tools: bool = False
    shows_calls: bool = False
    shows_system: bool = True
    text_arguments: bool = False
    short_ids: bool = False


def probe_tools(render: Callable[..., str]) -> ToolSupport:
    """Returns what a template does, found out by trying.

    Args:
      render: renders messages and tools; returns "" where the template refuses.
    """

    def shown(*messages: Mapping[str, Any], tools: Sequence[Any] | None = None) -> str:
        return render(messages=list(messages), tools=tools, add_generation_prompt=True)

    shows_tools = _PROBE in shown(_USER, tools=[_TOOL])
    system = {"role": "system", "content": "probe-system"}
    shows_system = "probe-system" in shown(system, _USER)
    arguments = {"probe_key": "probe_value"}
    ids = ("call_probe", "probe1234")
    for call_id, as_text in product(ids, (False, True)):
        call = {"name": _PROBE, "arguments": json.dumps(arguments) if as_text else arguments}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        }
        result = {"role": "tool", "tool_call_id": call_id, "name": _PROBE, "content": "probe"}
        text = shown(_USER, message, result)
        # A template that prints text as JSON would quote the quotes.
        if _PROBE in text and "probe_value" in text and '\\"probe_key' not in text:
            return ToolSupport(shows_tools, True, shows_system, as_text, call_id != ids[0])
    return ToolSupport(shows_tools=shows_tools, shows_system=shows_system)


@dataclass(frozen=True)
class AdaptedChat:
    """A chat as a template is to get it.

    Attributes:
      tools: those the template lists itself.
      calls: how the model writes calls.
    """

    messages: Chat
    tools: Sequence[Any] | None
    calls: CallFormat


def adapt(
    messages: Chat,
    tools: Sequence[Any],
    form: CallFormat | None,
    find_support: Callable[[], ToolSupport],
) -> AdaptedChat:
    """Returns a chat with tools so that a template shows all of it.

    Args:
      messages: the chat, calls with their arguments as objects.
      tools: in OpenAI's form.
      form: how the template writes calls; None means in an unknown way.
      find_support: what else it does, asked for where it matters.
    """
    calls = form or HERMES
    if not tools and not _has_calls(messages):
        return AdaptedChat(messages, None, calls)
    support = find_support()
    if not _has_calls(messages):
        pass
    elif form is not None and support.shows_calls:
        messages = _with_calls_as_wanted(messages, support)
    else:
        messages = _with_calls_as_text(messages, calls)
    if tools and form is not None and support.shows_tools:
        return AdaptedChat(messages, tools, calls)
    if tools:
        messages = _with_instruction(messages, tools, calls, in_system=support.shows_system)
    return AdaptedChat(messages, None, calls)


def _has_calls(messages: Chat) -> bool:
    """Whether a message of the chat calls a function."""
    return any(message.get("tool_calls") for message in messages)


def _with_instruction(
    messages: Chat, tools: Sequence[Any], form: CallFormat, in_system: bool
) -> list[dict[str, Any]]:
    """Returns the chat with the tools and how to call them said in words.

    Args:
      messages: the chat.
      tools: in OpenAI's form.
      form: how calls are to be written.
      in_system: whether the system message says it, or else the first message of the user.
    """
    text = _INSTRUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        call=written_calls(form, [("<function's name>", _PLACEHOLDERS[form.python_arguments])]),
    )
    chat = [dict(message) for message in messages]
    if in_system:
        if chat and chat[0].get("role") == "system":
            chat[0]["content"] = _joined(chat[0].get("content"), text)
            return chat
        return [{"role": "system", "content": text}, *chat]
    for message in chat:
        if message.get("role") == "user":
            message["content"] = _joined(text, message.get("content"))
            return chat
    return [{"role": "user", "content": text}, *chat]


def _with_calls_as_text(messages: Chat, form: CallFormat) -> list[dict[str, Any]]:
    """Returns the chat with calls and their results as texts of the assistant and the user."""
    chat: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls")
        plain = {name: value for name, value in message.items() if not name.startswith("tool_call")}
        if role == "tool":
            text = f"<tool_response>\n{_text_of(message.get('content'))}\n</tool_response>"
            if follows_result:
                chat[-1]["content"] += "\n" + text
            else:
                chat.append({"role": "user", "content": text})
        elif calls:
            named = [
                (each["function"]["name"], each["function"].get("arguments")) for each in calls
            ]
            text = written_calls(form, named)
            chat.append({**plain, "content": _joined(message.get("content"), text)})
        else:
            chat.append(plain)
        follows_result = role == "tool"
    return chat


def _with_calls_as_wanted(messages: Chat, support: ToolSupport) -> list[dict[str, Any]]:
    """Returns the chat with calls in the form that the template wants."""
    chat = []
    for message in messages:
        message = dict(message)
        if support.short_ids and message.get("tool_call_id") is not None:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        calls = message.get("tool_calls")
        if calls:
            message["tool_calls"] = [
                _wanted_call(call, index, support) for index, call in enumerate(calls)
            ]
            message["content"] = message.get("content") or ""
        chat.append(message)
    return chat


def _wanted_call(call: Mapping[str, Any], index: int, support: ToolSupport) -> dict[str, Any]:
    wanted = {**call, "function": dict(call["function"])}
    if support.text_arguments:
        arguments = wanted["function"].get("arguments")
        wanted["function"]["arguments"] = (
            arguments if isinstance(arguments, str) else _as_text(arguments)
        )
    if support.short_ids:
        wanted["id"] = _short_id(str(call.get("id", f"call {index}")))
    return wanted


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def written_calls(form: CallFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Returns calls, as (function's name, arguments), as the family writes them."""
    texts = [
        form.before.replace("$name", name) + _arguments(form, arguments) + form.after
        for name, arguments in calls
    ]
    return form.opening + form.between.join(texts) + form.closing


def _arguments(form: CallFormat, arguments: Any) -> str:
    if form.python_arguments and isinstance(arguments, Mapping):
        return ", ".join(f"{name}={_as_text(value)}" for name, value in arguments.items())
    return arguments if isinstance(arguments, str) else _as_text(arguments)


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _joined(first: Any, second: Any) -> Any:
    """Returns two contents as one; either may be a text, a list of parts or nothing."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts_of(first), {"type": "text", "text": "\n\n"}, *_parts_of(second)]


def _parts_of(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _text_of(content: Any) -> str:
    return "\n".join(str(part.get("text", "")) for part in _parts_of(content or ""))
