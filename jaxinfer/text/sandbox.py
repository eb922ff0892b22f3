"""A jinja2 sandbox with limits, for chat templates: model files are untrusted.

Nothing a template does may change its arguments, reach Python's internals, make a value or an
output of more than MAX_CHARS characters, or take longer than RENDER_TIMEOUT_S.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARS = 16 * 2**20
"""Characters that one value, or a whole output, may have."""
MAX_TOTAL_CHARS = 16 * MAX_CHARS
"""Characters that all the values made by one rendering may have together."""
RENDER_TIMEOUT_S = 5.0
MAX_INT_BITS = 4096
MAX_JSON_INDENT = 64
_ENTRY_CHARS = 8  # what an entry of a list is charged beside its content

# Methods and filters whose cost cannot be told from the sizes of their arguments.
_REFUSED_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})
_OF_JINJA = ("_loop_vars", "_block_vars")
_REFUSED_FILTERS = ("center", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_GLOBALS = ("lipsum",)
_PADDING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_REPEATING_FILTERS = frozenset({"batch", "indent", "round", "slice"})
_PERCENT_FORMAT = re.compile(r"%(?:\([^)]*\))?([-+ #0-9.*]*)")


class RefusalError(Exception):
    """What a template reports by `raise_exception`; its text is meant for the user."""


class LimitError(Exception):
    """A rendering took too long or made too much text."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + RENDER_TIMEOUT_S
        self.chars = MAX_TOTAL_CHARS

    def spend(self, chars: int) -> None:
        """Takes `chars` characters off; raises LimitError when they or the time are used up."""
        self.chars -= chars
        if chars > MAX_CHARS or self.chars < 0:
            raise LimitError(f"it makes more than {MAX_CHARS} characters of text")
        if time.monotonic() > self.deadline:
            raise LimitError(f"rendering takes longer than {RENDER_TIMEOUT_S:g} s")


class Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's chat template environment, with every way to multiply text metered.

    Templates are compiled and rendered inside `metered()`; threads have separate budgets.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._finalize,
        )
        self._local = threading.local()
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        for name in _REFUSED_GLOBALS:
            del self.globals[name]
        self.filters |= {"tojson": _tojson, "join": self._join, "replace": self._replace}
        self.filters = {name: self._metered(name, f) for name, f in self.filters.items()}
        self.globals |= {
            "dict": _make_dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def compile_template(self, source: str) -> jinja2.Template:
        """Compiles a template; raises jinja2.TemplateSyntaxError, with its line."""
        self._local.budget = Budget()
        return self.from_string(_Metering().visit(self.parse(source)))

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Renders a template of this environment.

        Raises:
          LimitError, RefusalError: see there.
          Exception: whatever else the template's code runs into.
        """
        budget = self._local.budget = Budget()
        chunks = []
        size = 0
        for chunk in template.generate(variables):
            size += len(chunk)
            budget.spend(size if size > MAX_CHARS else 0)
            chunks.append(chunk)
        return "".join(chunks)

    def tick(self) -> None:
        """Checks the time; compiled into the body of every loop."""
        self.charge(0)

    def concatenate(self, *values: Any) -> str:
        """The `~` operator."""
        self._spend(values)
        return "".join(map(str, values))

    def charge(self, chars: int) -> None:
        """Takes characters off this thread's budget."""
        self._local.budget.spend(chars)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also refuses methods whose cost their arguments do not show."""
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the metered `str.format`, or None if `value` is something else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template, takes_mapping = value.__self__, value.__name__ == "format_map"

        def format_text(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                [kwargs] = args
            self._spend(template)
            return _Formatter(self).vformat(template, () if takes_mapping else args, kwargs)

        return format_text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pays for the result of an operator before computing it."""
        match operator, left, right:
            case "*" | "**", int(), int():
                bits = left.bit_length() * right if operator == "**" else left.bit_length()
                if bits + right.bit_length() > MAX_INT_BITS:
                    raise LimitError(f"it computes a number of more than {MAX_INT_BITS} bits")
            case "*", int(), _:
                self._spend(right, times=left)
            case "*", _, int():
                self._spend(left, times=right)
            case "%", str(), _:
                self._spend_percent_format(left, right)
            case "+", _, _:
                self._spend((left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Pays for a call; private parameter names leave all names to the callee's keywords."""
        __self.tick()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(owner, str):
            if name == "join":
                [items] = args
                return __self._join(items, owner)
            if name == "replace":
                # Of a call within a loop that sets variables, the names it sets: jinja's, for
                # functions that ask for a context.
                given = {k: v for k, v in kwargs.items() if k not in _OF_JINJA}
                return __self._replace(owner, *args, **given)
            if name in _PADDING_METHODS:
                __self._spend_repeats(owner, _largest_int((args, kwargs)), "\t")
        return super().call(__context, __obj, *args, **kwargs)

    def _spend(self, value: Any, times: int = 1) -> None:
        self.charge(_size(value) * max(times, 0))

    def _spend_repeats(self, text: Any, width: int, separator: str) -> None:
        """Pays for padding of `width` at every separator of a text."""
        places = 1 + (text.count(separator) if isinstance(text, str) else 0)
        self.charge(places * width)

    def _finalize(self, value: Any) -> Any:
        self._spend(value)
        return value

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that first pays for the text it is given, and for its repetitions."""

        @functools.wraps(function)  # keeps jinja's marks on functions that want the context
        def metered(*args: Any, **kwargs: Any) -> Any:
            if name == "format":
                self._spend_percent_format(str(args[0]), kwargs or args[1:])
            if name in _REPEATING_FILTERS:
                self._spend_repeats(args[0], _largest_int((args[1:], kwargs)), "\n")
            self._spend((args, kwargs))
            return function(*args, **kwargs)

        return metered

    def _spend_percent_format(self, template: str, args: Any) -> None:
        fields = _PERCENT_FORMAT.findall(template)
        numbers = [int(digits) for field in fields for digits in re.findall(r"\d+", field)]
        starred = _largest_int(args) if any("*" in field for field in fields) else 0
        widest = max([*numbers, starred], default=0)
        self.charge(len(template) + len(fields) * (widest + _size(args)))

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        texts: list[str] = []
        size = 0
        for item in items:
            size += _size(item) + _size(d)
            self.charge(size if size > MAX_CHARS else 0)
            texts.append(str(item))
        self.charge(size)
        return str(d).join(texts)

    def _replace(self, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        self._spend(s)
        text, old, new, limit = str(s), str(old), str(new), -1 if count is None else count
        found = text.count(old) if limit < 0 else min(limit, text.count(old))
        self.charge(len(text) + found * len(new))
        return text.replace(old, new, limit)


class _Metering(NodeTransformer):
    """Puts a time check into every loop, and the metered operation in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training: plain text here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Formatter(SandboxedFormatter):
    """`str.format` whose widths are metered after nested fields are filled in."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self._sandbox = sandbox

    def format_field(self, value: Any, format_spec: str) -> str:
        widths = [int(digits) for digits in re.findall(r"\d+", format_spec)]
        self._sandbox.charge(_size(value) + max(widths, default=0))
        return super().format_field(value, format_spec)


class _Namespace(Namespace):
    """`namespace()`; names that Python or jinja look up by themselves cannot be set."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a keyword
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # its contents could be repeated without limit


def _refuse_private(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _call(method: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(target, args, [], None, None, lineno=line)


def _size(value: Any) -> int:
    """Returns how many characters `value` has as text, roughly; stops counting at MAX_CHARS."""
    total = 0
    stack = [value]
    while stack and total <= MAX_CHARS:
        item = stack.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, dict):
            total += _ENTRY_CHARS * len(item)
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            total += _ENTRY_CHARS * len(item)
            stack += item
        elif isinstance(item, int):
            total += 1 + item.bit_length() // 3
        else:
            total += 1
    return total


def _largest_int(value: Any) -> int:
    """Returns the largest absolute integer in arguments, and the length of the longest text."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return max(map(_largest_int, value), default=0)
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str) else 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja's own filter, as Hugging Face renders it."""
    if _largest_int((indent, separators)) > MAX_JSON_INDENT:
        raise LimitError(f"tojson indents by more than {MAX_JSON_INDENT}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict()` without the type's methods, which could change the arguments of a template."""
    return dict(*args, **kwargs)


def _raise_exception(message: Any) -> None:
    raise RefusalError(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002  templates may name it
    """The server's local time."""
    return datetime.now().strftime(format)
