"""The parameters about tools: what they may be, and what they ask for together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.server.errors import invalid, missing, shown, unsupported
from jaxinfer.server.fields import Field, array, boolean, described, json_object, one_of, string

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]*")
_MAX_NAME = 64
_NAMED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": f"^[A-Za-z0-9_-]{{1,{_MAX_NAME}}}$"}},
}


@dataclass(frozen=True)
class ToolRequest:
    """The functions that an answer may call.

    Attributes:
      tools: in OpenAI's form, {"type": "function", "function": {...}}; only those that may be
        called.
      is_required: the answer must be a call.
      only_one: it may be one call at most.
      is_legacy: the request says `functions`, so the answer says `function_call`.
    """

    tools: tuple[dict[str, Any], ...]
    is_required: bool = False
    only_one: bool = False
    is_legacy: bool = False

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters' JSON Schema by the function's name."""
        functions = (tool["function"] for tool in self.tools)
        return {function["name"]: function["parameters"] for function in functions}

    @property
    def strict(self) -> frozenset[str]:
        """The names of functions whose arguments must fit their schema."""
        functions = (tool["function"] for tool in self.tools)
        return frozenset(each["name"] for each in functions if each.get("strict"))


@dataclass(frozen=True)
class _Choice:
    """Which functions are to be called: `names`, by their path in the request; None means any."""

    mode: str
    names: Mapping[str, str] | None = None
    only_one: bool = False


def _read_name(value: Any, path: str) -> str:
    if value is None:
        raise missing(path)
    name = string(_MAX_NAME)(value, path)
    if not name or not _NAME.fullmatch(name):
        raise invalid(
            path, f"{path} must be 1 to {_MAX_NAME} of A-Z a-z 0-9 _ and -, got {shown(name)}"
        )
    return name


@described(_NAMED)
def _read_function(value: Any, path: str) -> dict[str, Any]:
    """Returns a function with its name, its parameters, and what else it has."""
    function = json_object(value, path)
    read: dict[str, Any] = {"name": _read_name(function.get("name"), f"{path}.name")}
    if function.get("description") is not None:
        read["description"] = string()(function["description"], f"{path}.description")
    parameters = {} if function.get("parameters") is None else function["parameters"]
    json_object(parameters, f"{path}.parameters")
    if parameters.get("type", "object") != "object":
        where = f"{path}.parameters.type"
        raise invalid(where, f"{where} must be 'object', got {shown(parameters['type'])}")
    read["parameters"] = parameters or {"type": "object", "properties": {}}
    if function.get("strict") is not None:
        read["strict"] = boolean(function["strict"], f"{path}.strict")
    return read


def _check_type(value: Mapping[str, Any], path: str, *kinds: str) -> str:
    kind = value.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if kind == "custom":
        raise unsupported(f"{path}.type", f"{path}.type custom is not supported: use function")
    return str(one_of(*kinds)(kind, f"{path}.type"))


@described(
    {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": _NAMED},
    }
)
def _read_tool(value: Any, path: str) -> dict[str, Any]:
    tool = json_object(value, path)
    _check_type(tool, path, "function")
    if tool.get("function") is None:
        raise missing(f"{path}.function")
    return {"type": "function", "function": _read_function(tool["function"], f"{path}.function")}


def _read_reference(value: Any, path: str) -> tuple[str, str]:
    """Returns where {"function": {"name": ...}} has its name, and the name."""
    function = json_object(json_object(value, path).get("function"), f"{path}.function")
    where = f"{path}.function.name"
    return where, _read_name(function.get("name"), where)


_MODES = ("none", "auto", "required")


TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"type": "string", "enum": list(_MODES)},
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["function", "allowed_tools"]}},
        },
    ]
}


@described(TOOL_CHOICE_SCHEMA)
def _read_tool_choice(value: Any, path: str) -> _Choice:
    if isinstance(value, str):
        return _Choice(one_of(*_MODES)(value, path))
    kind = _check_type(json_object(value, path), path, "function", "allowed_tools")
    if kind == "function":
        where, name = _read_reference(value, path)
        return _Choice("required", {where: name}, only_one=True)
    path = f"{path}.allowed_tools"
    allowed = json_object(value.get("allowed_tools"), path)
    mode = one_of("auto", "required")(allowed.get("mode"), f"{path}.mode")

    def read(tool: Any, where: str) -> tuple[str, str]:
        _check_type(json_object(tool, where), where, "function")
        return _read_reference(tool, where)

    named = array(read, low=1, high=MAX_TOOLS)(allowed.get("tools"), f"{path}.tools")
    return _Choice(mode, dict(named))


@described({"anyOf": [{"type": "string", "enum": ["none", "auto"]}, _NAMED]})
def _read_function_call(value: Any, path: str) -> _Choice:
    if isinstance(value, str):
        return _Choice(one_of("none", "auto")(value, path))
    where = f"{path}.name"
    name = _read_name(json_object(value, path).get("name"), where)
    return _Choice("required", {where: name}, only_one=True)


TOOL_FIELDS: Mapping[str, Field] = {
    "tools": Field(array(_read_tool, high=MAX_TOOLS)),
    "tool_choice": Field(_read_tool_choice),
    "parallel_tool_calls": Field(boolean),
    "functions": Field(array(_read_function, high=MAX_TOOLS)),
    "function_call": Field(_read_function_call),
}


def read_tools(values: Mapping[str, Any]) -> ToolRequest | None:
    """Returns what the parameters of `TOOL_FIELDS` ask for; None if nothing may be called.

    Raises:
      ApiError: 400; two functions have one name, a choice names none of them, or both ways of
        offering functions are used.
    """
    tools = values.get("tools", [])
    functions = values.get("functions", [])
    if tools and functions:
        raise invalid("functions", "functions is the old name of tools; send only one of them")
    _check_names(tools, "tools[{}].function.name")
    _check_names([{"function": function} for function in functions], "functions[{}].name")
    new = _chosen("tool_choice", values.get("tool_choice"), "tools", tools)
    wrapped = [{"type": "function", "function": function} for function in functions]
    old = _chosen("function_call", values.get("function_call"), "functions", wrapped)
    if old is not None:
        required, chosen, _ = old
        return ToolRequest(chosen, required, only_one=True, is_legacy=True)
    if new is None:
        return None
    required, chosen, only_one = new
    is_parallel = values.get("parallel_tool_calls", True)
    return ToolRequest(chosen, required, only_one=only_one or not is_parallel)


def _check_names(tools: Sequence[Mapping[str, Any]], path: str) -> None:
    seen = set()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            where = path.format(index)
            raise invalid(where, f"{where} is {shown(name)}, which an earlier function has already")
        seen.add(name)


def _chosen(
    param: str, choice: _Choice | None, needed: str, tools: Sequence[dict[str, Any]]
) -> tuple[bool, tuple[dict[str, Any], ...], bool] | None:
    """Returns whether a call is required, what may be called, and whether once only."""
    choice = choice or _Choice("auto")
    if not tools:
        if choice.mode == "required" or choice.names is not None:
            raise invalid(param, f"{param} needs {needed}, and there are none")
        return None
    by_name = {tool["function"]["name"]: tool for tool in tools}
    names = choice.names
    for where, name in (names or {}).items():
        if name not in by_name:
            known = ", ".join(list(by_name)[:10])
            raise invalid(where, f"{where} is {shown(name)}, which {needed} lack: {known}")
    if choice.mode == "none":
        return None
    chosen = tools if names is None else [by_name[name] for name in dict.fromkeys(names.values())]
    return choice.mode == "required", tuple(chosen), choice.only_one
