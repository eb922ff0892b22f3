"""From a chat request to its prompt, its grammar, and how its answer is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from jaxinfer.constraints.grammar_text import lark_rule
from jaxinfer.grammar import Grammar
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.server.errors import invalid
from jaxinfer.server.protocol_chat import ChatRequest
from jaxinfer.server.tools import ToolRequest
from jaxinfer.text import ChatTemplate, TemplateError, Tokenizer
from jaxinfer.text.tool_calls import AnswerSyntax, CallFormat, Markers, ReasoningTags
from jaxinfer.text.tool_calls.call_grammar import WHITE_SPACE, answer_grammar


@dataclass(frozen=True)
class ChatPrompt:
    """A chat request made ready for the engine.

    Attributes:
      ids: the prompt.
      params: the request's, with the grammar of calls that must be made, and with special tokens in
        the text where they mark reasoning or calls.
      syntax: how the answer is read; None if all of it is text.
    """

    ids: list[int]
    params: SamplingParams
    syntax: AnswerSyntax | None


def prepare_chat(template: ChatTemplate, tokenizer: Tokenizer, call: ChatRequest) -> ChatPrompt:
    """Renders a chat and settles how its answer is written and read.

    Raises:
      ApiError: 400; the template refuses the chat, or tools and a grammar exclude each other.
    """
    tools = call.tools
    try:
        chat = template.adapted(call.messages, () if tools is None else tools.tools)
        text = template.render(chat.messages, tools=chat.tools, **call.template_options)
    except TemplateError as error:
        raise invalid(error.param, str(error)) from None
    # Templates write the special tokens themselves.
    adds_special_tokens = call.options.add_special_tokens or False
    ids = tokenizer.encode(text, add_special_tokens=adds_special_tokens)
    params = call.options.params
    # What a grammar of the client's own says of reasoning is not known.
    is_own = params.grammar is not None and params.grammar.kind == "lark"
    reasoning = None if is_own else template.reasoning
    if reasoning is None and tools is None:
        return ChatPrompt(ids, params, None)
    syntax = AnswerSyntax(
        reasoning=reasoning,
        starts_in_reasoning=reasoning is not None and _opens(reasoning, text, call),
        calls=None if tools is None else chat.calls,
        tools={} if tools is None else tools.schemas,
        only_one_call=tools is not None and tools.only_one,
    )
    markers = _special_markers(tokenizer, reasoning, syntax.calls)
    params = replace(params, grammar=_grammar(params.grammar, syntax, tools, markers))
    if markers and params.skip_special_tokens:
        params = replace(params, skip_special_tokens=False)
        syntax = replace(syntax, dropped=_other_special_texts(tokenizer, markers))
    return ChatPrompt(ids, params, syntax)


def _opens(tags: ReasoningTags, prompt: str, call: ChatRequest) -> bool:
    """Whether the prompt ends within the reasoning."""
    if not call.template_options.get("continue_final_message"):
        return prompt.rstrip().endswith(tags.open)
    content = call.messages[-1].get("content", "")
    last = content if isinstance(content, str) else content[-1]["text"]
    return bool(last.rfind(tags.open) > last.rfind(tags.close))


def _special_markers(
    tokenizer: Tokenizer, reasoning: ReasoningTags | None, calls: CallFormat | None
) -> dict[str, int]:
    """Returns the ids of those markers that are special tokens."""
    texts = [] if reasoning is None else [reasoning.open, reasoning.close]
    texts += [] if calls is None else calls.markers
    ids = {text: tokenizer.token_id(text) for text in texts}
    return {
        text: token_id
        for text, token_id in ids.items()
        if token_id is not None and token_id in tokenizer.special_ids
    }


_dropped: WeakKeyDictionary[Tokenizer, dict[frozenset[str], Markers]] = WeakKeyDictionary()
"""By tokenizer and by markers: there can be a thousand special tokens."""


def _other_special_texts(tokenizer: Tokenizer, markers: Mapping[str, int]) -> Markers:
    """Returns the texts of special tokens that are no markers."""
    known = _dropped.setdefault(tokenizer, {})
    key = frozenset(markers)
    if key not in known:
        others = tokenizer.special_ids.difference(markers.values())
        known[key] = Markers(filter(None, map(tokenizer.token_text, others)))
    return known[key]


def _grammar(
    grammar: Grammar | None,
    syntax: AnswerSyntax,
    tools: ToolRequest | None,
    markers: Mapping[str, int],
) -> Grammar | None:
    """Returns the grammar of the whole answer: of calls, and of what the request itself asks."""
    is_required = tools is not None and tools.is_required
    strict = frozenset() if tools is None else tools.strict
    if grammar is None and not is_required and not strict:
        return None
    other = None
    if grammar is not None and not is_required:
        if grammar.kind == "lark":
            message = f"{grammar.param} cannot be combined with tools, except with tool_choice none"
            raise invalid(grammar.param, message)
        other = lark_rule(grammar, WHITE_SPACE)
    text = answer_grammar(syntax, markers, is_required=is_required, strict=strict, other=other)
    is_given = grammar is not None and not is_required
    return Grammar("lark", text, param=grammar.param if grammar and is_given else "tools")
