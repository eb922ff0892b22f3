"""The ways in which model families write calls: the registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.text.tool_calls.json_calls import json_array, json_call, streamed_arguments
from jaxinfer.text.tool_calls.python_calls import python_calls
from jaxinfer.text.tool_calls.source import Calls, NotACall, Reader, Reading, Source
from jaxinfer.text.tool_calls.xml_calls import xml_call

_NAME = re.compile(r"[\w.-]*")


@dataclass(frozen=True)
class CallFormat:
    """How calls are written.

    Attributes:
      name: for messages and tests.
      is_of: whether a chat template, by its source, teaches this way.
      read: reads calls from behind their marker.
      starts: the markers that calls begin with, anywhere in the answer.
      bare: characters that a call without marker begins with, at the beginning of the answer.
      inner: further markers.
      opening, before, after, between, closing: what is written before all calls, before and after
        the arguments of each, where `$name` is the function's name, between two calls and after
        all of them.
      python_arguments: whether arguments are written as `name=value, ...` and not as an object.
    """

    name: str
    is_of: Callable[[str], bool]
    read: Reader
    before: str
    after: str
    starts: tuple[str, ...] = ()
    bare: str = ""
    inner: tuple[str, ...] = ()
    opening: str = ""
    between: str = ""
    closing: str = ""
    python_arguments: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed strings that tell calls from text: they must not be taken out of it."""
        return self.starts + self.inner


def format_of(template: str) -> CallFormat | None:
    """Returns the way that a chat template's source teaches, or None if it is none of ours."""
    return next((form for form in FORMATS if form.is_of(template)), None)


def _contains(*needed: str) -> Callable[[str], bool]:
    return lambda template: all(text in template for text in needed)


def _is_hermes(template: str) -> bool:
    has_json = re.search(r'\\?"name\\?": ', template) is not None
    return "<tool_call>" in template and has_json and "<function=" not in template


def _end(source: Source, *markers: str) -> Reading[None]:
    """Takes an end marker and white space before it, if they follow; all of it or its beginning."""
    yield from source.skip_space()
    for marker in markers:
        if (yield from source.take(marker)):
            source.commit()
            return
        if source.is_complete and marker.startswith(source.text[source.pos :]):
            source.pos = len(source.text)
            source.commit()
            return
    source.rewind()


def _read_hermes(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip_space()
    if (yield from source.peek()) == "<":
        yield from xml_call(source, calls)
    elif (yield from source.take("[")):
        yield from json_array(source, calls)
    else:
        yield from json_call(source, calls)
    yield from _end(source, "</tool_call>")


def _read_llama(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip_space()
    if (yield from source.take("[")):
        yield from json_array(source, calls)
        return
    yield from json_call(source, calls)
    while True:
        yield from source.skip_space()
        if not (yield from source.take(";")):
            source.rewind()
            return
        yield from source.skip_space()
        yield from json_call(source, calls)


def _read_mistral(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip_space()
    if (yield from source.take("[")):
        yield from json_array(source, calls)
        return
    name = calls.check((yield from source.span(_NAME)))
    if (yield from source.take("[CALL_ID]")):
        yield from source.span(_NAME)
    yield from source.take("[ARGS]")
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        raise NotACall
    yield from streamed_arguments(source, calls, name)


_DEEPSEEK_CALL, _DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_CALLS, _DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"


def _read_deepseek(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip_space()
    yield from source.expect(_DEEPSEEK_CALL)
    while True:
        yield from _read_deepseek_call(source, calls)
        yield from source.skip_space()
        if (yield from source.take(_DEEPSEEK_CALLS_END)):
            source.commit()
            return
        if not (yield from source.take(_DEEPSEEK_CALL)):
            source.rewind()
            return


def _read_deepseek_call(source: Source, calls: Calls) -> Reading[None]:
    """Reads `name<sep>{...}`, or, as V3 and R1 write it, `function<sep>name` and a code block."""
    name = yield from source.span(_NAME)
    yield from source.expect(_DEEPSEEK_SEPARATOR)
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        name = yield from source.span(_NAME)
        yield from source.skip_space()
        yield from source.take("```json")
        yield from source.skip_space()
    if (yield from source.peek()) != "{":
        raise NotACall
    yield from streamed_arguments(source, calls, calls.check(name))
    yield from _end(source, "```")
    yield from _end(source, _DEEPSEEK_CALL_END)


def _read_python(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip_space()
    yield from python_calls(source, calls)
    yield from _end(source, "<|tool_call_end|>", "<|python_end|>")


HERMES = CallFormat(
    name="hermes",
    is_of=_is_hermes,
    read=_read_hermes,
    starts=("<tool_call>",),
    inner=("</tool_call>",),
    before='<tool_call>\n{"name": "$name", "arguments": ',
    after="}\n</tool_call>",
    between="\n",
)
"""NousResearch's Hermes, Qwen 2.5 and 3, and what a model that knows no tools is taught."""

FORMATS = (
    HERMES,
    CallFormat(
        name="qwen_coder",
        is_of=_contains("<tool_call>", "<function="),
        read=_read_hermes,
        starts=("<tool_call>",),
        inner=("</tool_call>",),
        # The family's general form: a schema cannot be enforced inside its tags.
        before=HERMES.before,
        after=HERMES.after,
        between=HERMES.between,
    ),
    CallFormat(
        name="mistral_names",
        is_of=_contains("[TOOL_CALLS]", "[ARGS]"),
        read=_read_mistral,
        starts=("[TOOL_CALLS]",),
        inner=("[CALL_ID]", "[ARGS]"),
        before="[TOOL_CALLS]$name[ARGS]",
        after="",
    ),
    CallFormat(
        name="mistral",
        is_of=_contains("[TOOL_CALLS]"),
        read=_read_mistral,
        starts=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS][",
        before='{"name": "$name", "arguments": ',
        after="}",
        between=", ",
        closing="]",
    ),
    CallFormat(
        name="deepseek_v3",
        is_of=_contains(_DEEPSEEK_CALLS, "```json"),
        read=_read_deepseek,
        starts=(_DEEPSEEK_CALLS,),
        inner=(_DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END, _DEEPSEEK_SEPARATOR),
        opening=_DEEPSEEK_CALLS,
        before=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_SEPARATOR}$name\n```json\n",
        after=f"\n```{_DEEPSEEK_CALL_END}",
        between="\n",
        closing=_DEEPSEEK_CALLS_END,
    ),
    CallFormat(
        name="deepseek",
        is_of=_contains(_DEEPSEEK_CALLS),
        read=_read_deepseek,
        starts=(_DEEPSEEK_CALLS,),
        inner=(_DEEPSEEK_CALL, _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END, _DEEPSEEK_SEPARATOR),
        opening=_DEEPSEEK_CALLS,
        before=f"{_DEEPSEEK_CALL}$name{_DEEPSEEK_SEPARATOR}",
        after=_DEEPSEEK_CALL_END,
        closing=_DEEPSEEK_CALLS_END,
    ),
    CallFormat(
        name="lfm2",
        is_of=lambda template: (
            "<|tool_call_start|>" in template or "<|tool_list_start|>" in template
        ),
        read=_read_python,
        starts=("<|tool_call_start|>",),
        inner=("<|tool_call_end|>",),
        opening="<|tool_call_start|>[",
        before="$name(",
        after=")",
        between=", ",
        closing="]<|tool_call_end|>",
        python_arguments=True,
    ),
    CallFormat(
        name="pythonic",
        is_of=lambda template: re.search(r"\[\w+\(\w+=", template) is not None,
        read=_read_python,
        starts=("<|python_start|>",),
        inner=("<|python_end|>",),
        bare="[",
        opening="[",
        before="$name(",
        after=")",
        between=", ",
        closing="]",
        python_arguments=True,
    ),
    CallFormat(
        name="llama3_json",
        is_of=_contains("<|eot_id|>", '"parameters": '),
        read=_read_llama,
        starts=("<|python_tag|>",),
        bare="{[",
        before='{"name": "$name", "parameters": ',
        after="}",
        between="; ",
    ),
)
