"""Chat completions: OpenAI's `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from jaxinfer.outputs import CompletionOutput, OutputDelta, TokenLogprob
from jaxinfer.server.answers import Answer, ended_by_token
from jaxinfer.server.logprobs import chat_logprobs, prompt_logprobs
from jaxinfer.text.tool_calls import (
    AnswerParser,
    AnswerSyntax,
    CallDelta,
    Event,
    Message,
    Reasoning,
    Text,
    fold,
)


class ChatAnswer(Answer):
    """The answer to a chat request: one prompt, n messages.

    Args:
      syntax: how reasoning and calls are told from text; None if all is text.
      is_legacy: a call is the message's `function_call`.
      includes_reasoning: reasoning is sent, under both of its names.
      echo: what the content begins with.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        *args: Any,
        syntax: AnswerSyntax | None = None,
        is_legacy: bool = False,
        includes_reasoning: bool = True,
        echo: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._syntax = syntax
        self._is_legacy = is_legacy
        self._includes_reasoning = includes_reasoning
        self._echo = echo
        self._parsers: dict[int, AnswerParser] = {}
        self._has_called: set[int] = set()
        self._taken: dict[int, list[Event]] = {}  # of an answer that is not streamed
        self._close_id: int | None = None
        if syntax is not None and syntax.reasoning is not None:
            self.usage.reasoning_tokens = 0
            self._close_id = self.tokenizer.token_id(syntax.reasoning.close)
        options = self.options
        self._is_plain = (
            syntax is None and options.params.logprobs is None and not options.return_token_ids
        )

    def opening(self) -> list[dict[str, Any]]:
        """Returns one role delta per choice; the role is never sent again. Then what is echoed."""
        prompt_ids = self._prompt_ids(0)
        roles = [
            {**self._streamed(index, {"role": "assistant", "content": ""}), **prompt_ids}
            for index in range(self.n)
        ]
        if not self._echo:
            return roles
        echo = {"content": self._echo}
        return [*roles, *(self._streamed(index, echo) for index in range(self.n))]

    def delta(self, prompt: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Returns what is new in the message, piece by piece, and then the finish reason."""
        index = self.index(prompt, delta.index)
        if self._is_plain and delta.finish_reason is None:
            return [self._streamed(index, {"content": delta.text})] if delta.text else []
        pieces = [
            piece for event in self._events(index, delta) for piece in self._piece(index, event)
        ]
        shows_tokens = delta.token_ids and self.options.return_token_ids
        if not pieces and (delta.logprobs or shows_tokens):
            pieces = [{"content": ""}]
        choices = [self._streamed(index, piece) for piece in pieces]
        if choices:
            choices[0]["logprobs"] = self._logprobs(delta)
            if self.options.return_token_ids:
                choices[0]["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            choice = self._streamed(index, {})
            choice["finish_reason"] = self._finish_reason(delta, index in self._has_called)
            choice["stop_reason"] = delta.stop_reason
            choices.append(choice)
        return choices

    def take(self, prompt: int, delta: OutputDelta) -> None:
        """Adds a delta of the prompt."""
        super().take(prompt, delta)
        if self._syntax is not None:
            index = self.index(prompt, delta.index)
            self._taken.setdefault(index, []).extend(self._events(index, delta))

    def choice(
        self,
        prompt: int,
        output: CompletionOutput,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """Returns a complete message."""
        index = self.index(prompt, output.index)
        whole = Message(output.text) if self._syntax is None else fold(self._taken.get(index, ()))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echo + whole.text or (None if whole.calls else ""),
            "refusal": None,
        }
        if whole.reasoning and self._includes_reasoning:
            message |= _reasoning(whole.reasoning)
        if whole.calls and self._is_legacy:
            message["function_call"] = vars(whole.calls[0])
        elif whole.calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": vars(call)}
                for call in whole.calls
            ]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output, bool(whole.calls)),
            "stop_reason": output.stop_reason,
        }
        if self.options.return_token_ids:
            choice["token_ids"] = output.token_ids
        return {**choice, **self._prompt_ids(prompt)}

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the body of a chat completion, with the scores of the prompt if asked for."""
        body = super().body(choices)
        count, scores = self.options.prompt_logprobs, self.outputs[0].prompt_logprobs
        if count is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.tokenizer, scores or (), count)
        return body

    def _events(self, index: int, delta: OutputDelta) -> list[Event]:
        if self._syntax is None:
            return [Text(delta.text)] if delta.text else []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self._syntax)
        has_reasoned = parser.is_reasoning
        events = parser.push(delta.text)
        self._count_reasoning(delta, has_reasoned, parser.is_reasoning)
        if delta.finish_reason is not None:
            events += parser.finish()
            del self._parsers[index]
        return events

    def _count_reasoning(self, delta: OutputDelta, before: bool, after: bool) -> None:
        """Counts the tokens of a delta that are reasoning; `before` and `after` it there is some.

        Where it ends within, those up to its closing tag count, if that is one token.
        """
        if self.usage.reasoning_tokens is None:
            return
        if after:
            self.usage.reasoning_tokens += len(delta.token_ids) - ended_by_token(delta)
        elif before and self._close_id in delta.token_ids:
            self.usage.reasoning_tokens += delta.token_ids.index(self._close_id)

    def _piece(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Returns the delta of an event, in a list, which is empty if it is not to be sent."""
        match event:
            case Text(text):
                return [{"content": text}]
            case Reasoning(text):
                return [_reasoning(text)] if self._includes_reasoning else []
            case CallDelta(call, name, arguments):
                self._has_called.add(index)
                function: dict[str, Any] = {"arguments": arguments}
                if name is not None:
                    function = {"name": name, **function}
                if self._is_legacy:
                    return [{"function_call": function}]
                # Clients join the strings of all pieces: those of the head are sent once.
                head = {} if name is None else {"id": _call_id(), "type": "function"}
                return [{"tool_calls": [{"index": call, **head, "function": function}]}]

    def _finish_reason(self, end: CompletionOutput | OutputDelta, has_called: bool) -> str | None:
        """Returns why it ended; a call that the length has cut is not one to be made."""
        if end.finish_reason != "stop" or not has_called:
            return end.finish_reason
        return "function_call" if self._is_legacy else "tool_calls"

    def _streamed(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, output: CompletionOutput | OutputDelta) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        entries = chat_logprobs(
            self.tokenizer,
            output.logprobs,
            self.hidden(output),
            names_ids=self.options.names_ids,
        )
        return {"content": entries, "refusal": None}

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        if not self.options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.requests[prompt].prompt_token_ids)}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _reasoning(text: str) -> dict[str, str]:
    """Returns reasoning under the names by which clients look for it."""
    return {"reasoning_content": text, "reasoning": text}
