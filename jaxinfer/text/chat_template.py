"""Chat templates: messages to a prompt, as Hugging Face renders them, in a sandbox with limits.

Which template: `--chat-template` (a built-in name, else a file); else the model's own, where
`chat_template.jinja` replaces tokenizer_config.json and GGUF files hold theirs in their metadata;
of several, `tool_use` where tools are given and `default` otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from jaxinfer.text.sandbox import LimitError, RefusalError, Sandbox
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tool_calls.formats import CallFormat, format_of
from jaxinfer.text.tool_calls.parser import ReasoningTags
from jaxinfer.text.tool_calls.teaching import AdaptedChat, ToolSupport, adapt, probe_tools

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that extra template variables may not have: they are arguments of rendering."""

_REASONING_TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))

_MAX_SOURCE_CHARS = 2**20
# Follows the text to continue while rendering. The space tells whether the template trims.
_END_MARK = "|end-of-the-text-to-continue| "
_PROBE_WORDS = ("probe-first", "probe-second")


class TemplateError(ValueError):
    """A chat that cannot be rendered; the message is the template's own where it has one.

    Attributes:
      param: the request parameter at fault.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class _Template:
    """A compiled template, and whether it shows content given as text and as a list of parts.

    Attributes:
      calls: how it writes calls; None if that is not known here.
    """

    compiled: jinja2.Template
    shows_text: bool
    shows_parts: bool
    calls: CallFormat | None


class ChatTemplate:
    """Renders chats for one model; may be shared by threads.

    Attributes:
      reasoning: the tags the model puts around its reasoning, if it does.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
    ) -> None:
        """Compiles the templates.

        Args:
          source: one template, or several by name.
          special_tokens: variables of the template, such as `bos_token`.
          origin: where it comes from, for messages.

        Raises:
          TemplateError: a template is too long or not valid; names the line.
        """
        self._sandbox = Sandbox()
        self._special_tokens = dict(special_tokens or {})
        self._origin = origin
        self._unavailable: str | None = None
        by_name = {"default": source} if isinstance(source, str) else source
        self._templates = {name: self._compile(name, text) for name, text in by_name.items()}
        self._support: dict[_Template, ToolSupport] = {}
        texts = "".join(by_name.values())
        self.reasoning = next((tags for tags in _REASONING_TAGS if tags.close in texts), None)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplate:
        """Returns the template to use with a tokenizer's model.

        A model without a usable template still loads: rendering then raises the reason.

        Args:
          tokenizer: gives the model's own template and its special tokens.
          override: the name of a built-in template, else the path of a file.

        Raises:
          TemplateError: there is no such template, or it is not valid.
        """
        template = cls._of_tokenizer(tokenizer, override)
        if template.reasoning is None:
            # A template need not mention the tags of a model that opens them itself.
            known = (tags for tags in _REASONING_TAGS if tokenizer.token_id(tags.close) is not None)
            template.reasoning = next(known, None)
        return template

    @classmethod
    def _of_tokenizer(cls, tokenizer: Tokenizer, override: str | None) -> ChatTemplate:
        if override is not None:
            return cls(_read(override), tokenizer.special_tokens, f"chat template {override}")
        origin = f"chat template of {tokenizer.origin}"
        hint = f"pass --chat-template with one of {', '.join(builtin_names())}, or a file"
        template = cls({}, tokenizer.special_tokens, origin)
        if not tokenizer.chat_template:
            template._unavailable = f"the model has no chat template: {hint}"
            return template
        try:
            return cls(tokenizer.chat_template, tokenizer.special_tokens, origin)
        except TemplateError as error:
            template._unavailable = f"{error}; {hint}"
            return template

    @property
    def unavailable(self) -> str | None:
        """Why no chat can be rendered, or None."""
        return self._unavailable

    def adapted(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> AdaptedChat:
        """Returns a chat with tools so that the template shows all of it.

        How the model writes calls is read off the template. One that does not list tools, or lists
        them for calls of a kind unknown here, gets them in words, in the system message or, if it
        shows none, in the user's first; one that does not show earlier calls and their results gets
        them as texts.

        Args:
          messages: the chat, calls with their arguments as objects.
          tools: tool descriptions in OpenAI's form, {"type": "function", "function": {...}}.

        Raises:
          TemplateError: there is no usable template.
        """
        template = self._select(tools)
        if template.calls is None:
            template = self._select(None)
        return adapt(messages, tools, template.calls, lambda: self._support_of(template))

    def _support_of(self, template: _Template) -> ToolSupport:
        def render(messages: list[dict[str, Any]], **variables: Any) -> str:
            chat = [_plain_message(message, template) for message in messages]
            return self._probe(template.compiled, {"messages": chat, **variables})

        # Tried when first needed; two threads find out the same.
        if template not in self._support:
            self._support[template] = probe_tools(render)
        return self._support[template]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Returns the prompt of a chat; encode it without adding special tokens.

        Args:
          messages: the chat. Content that is a list of parts reaches templates that go through
            parts; for others the texts are joined by newlines. Values of None are left out.
          tools: tool descriptions.
          documents: documents for retrieval.
          add_generation_prompt: whether the prompt ends where the assistant begins to speak.
          continue_final_message: whether the prompt ends inside the last message.
          **kwargs: further template variables.

        Raises:
          TemplateError: the template refuses the chat, fails, or exceeds the limits.
        """
        if add_generation_prompt and continue_final_message:
            raise TemplateError(
                "add_generation_prompt and continue_final_message exclude each other: "
                "set one of them to false",
                param="continue_final_message",
            )
        self._check_kwargs(kwargs)
        template = self._select(tools)
        chat = [_plain_message(message, template) for message in messages]
        if continue_final_message:
            _mark_final_text(chat)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._render(template.compiled, variables)
        return _before_mark(prompt) if continue_final_message else prompt

    def _check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        for name in kwargs:
            if name in RESERVED_KWARGS or name in self._sandbox.globals or name.startswith("_"):
                raise TemplateError(
                    f"{name!r} cannot be a template variable: the name is reserved",
                    param="chat_template_kwargs",
                )

    def _select(self, tools: Sequence[Any] | None) -> _Template:
        if self._unavailable is not None:
            raise TemplateError(self._unavailable)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise TemplateError(
                f"{self._origin}: there is no template named 'default', only "
                f"{', '.join(self._templates)}: pass --chat-template"
            )
        return self._templates[name]

    def _compile(self, name: str, source: str) -> _Template:
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(
                f"{self._origin} ({name}): {len(source)} characters, at most {_MAX_SOURCE_CHARS}"
            )
        try:
            compiled = self._sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"{self._origin} ({name}), line {error.lineno}: {error.message}"
            ) from error
        except (LimitError, RecursionError, SyntaxError, ValueError) as error:
            raise TemplateError(f"{self._origin} ({name}): it cannot be compiled") from error
        first, second = _PROBE_WORDS
        parts = [{"type": "text", "text": word} for word in _PROBE_WORDS]
        as_parts = self._probe_content(compiled, parts)
        return _Template(
            compiled,
            shows_text=first in self._probe_content(compiled, first),
            # A template that knows only text shows the list as Python writes it, or fails.
            shows_parts=first in as_parts and second in as_parts and "'type'" not in as_parts,
            calls=format_of(source),
        )

    def _probe_content(self, compiled: jinja2.Template, content: Any) -> str:
        return self._probe(compiled, {"messages": [{"role": "user", "content": content}]})

    def _probe(self, compiled: jinja2.Template, variables: dict[str, Any]) -> str:
        """Returns how the template renders something small; nothing if it refuses to.

        Raises:
          TemplateError: even that exceeds the limits, so the template is of no use.
        """
        try:
            return self._render(compiled, {**self._special_tokens, **variables})
        except TemplateError as error:
            if isinstance(error.__cause__, LimitError):
                raise
            return ""

    def _render(self, compiled: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return self._sandbox.render(compiled, variables)
        except RefusalError as error:
            raise TemplateError(str(error)) from None
        except LimitError as error:
            raise TemplateError(f"{self._origin}: {error}") from error
        except SecurityError as error:
            raise TemplateError(f"{self._origin}: the sandbox forbids it: {error}") from error
        except Exception as error:  # a template's code can raise anything
            raise TemplateError(f"{self._origin}{_line_of(error)}: {error}") from error


def builtin_names() -> list[str]:
    """Returns the names that `--chat-template` knows."""
    return sorted(
        entry.name.removesuffix(".jinja")
        for entry in files("jaxinfer.text").joinpath("templates").iterdir()
        if entry.name.endswith(".jinja")
    )


def _read(override: str) -> str:
    """Returns a built-in template by name, or the content of a file."""
    if override in builtin_names():
        resource = files("jaxinfer.text").joinpath("templates", f"{override}.jinja")
        return resource.read_text(encoding="utf-8")
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(
            f"--chat-template {override}: neither a built-in template "
            f"({', '.join(builtin_names())}) nor a readable file: {error}",
            param="chat_template",
        ) from error


def _plain_message(message: Mapping[str, Any], template: _Template) -> dict[str, Any]:
    """Returns a copy of a message whose content has a form that the template shows."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, str) and template.shows_parts and not template.shows_text:
        plain["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list) and template.shows_parts:
        plain["content"] = copy.deepcopy(content)
    elif isinstance(content, list):
        plain["content"] = "\n".join(map(_part_text, content))
    return plain


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text", "text": str() as text}:
            return text
    raise TemplateError(
        f"a content part is {part!r:.80}, but this model's chat template takes only text: "
        'expected {"type": "text", "text": ...}'
    )


def _mark_final_text(chat: list[dict[str, Any]]) -> None:
    """Appends the mark to the last text of the last message."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
        return
    for part in reversed(content or []):
        if isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            return
    raise TemplateError(
        "continue_final_message needs a last message with text to continue",
        param="continue_final_message",
    )


def _before_mark(prompt: str) -> str:
    """Returns a prompt up to the mark, without the white space that the template trimmed."""
    end = prompt.rfind(_END_MARK.rstrip())
    if end < 0:
        raise TemplateError(
            "the chat template leaves out the end of the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return prompt[:end] if prompt.startswith(_END_MARK, end) else prompt[:end].rstrip()


def _line_of(error: Exception) -> str:
    """Returns ", line N" for the innermost template line in an error's traceback."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return "" if line is None else f", line {line}"
