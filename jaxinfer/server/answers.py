"""What all answers have in common: identity, usage, and how they become bodies and events."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxinfer.async_engine import EngineRequest
from jaxinfer.outputs import CompletionOutput, OutputDelta, RequestOutput, TokenLogprob
from jaxinfer.server.parameters import GenerationOptions
from jaxinfer.server.sse import dumps
from jaxinfer.text import Tokenizer


@dataclass
class Usage:
    """Token counts of an answer and what they took: each prompt once, every choice's output.

    Times are those of the engine, summed over prompts and over choices: how long each waited is not
    in them. They are known when a choice has come to its end.

    Attributes:
      reasoning_tokens: output tokens that are reasoning; None where none can be told.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)
    prompt_time: float = 0.0
    completion_time: float = 0.0
    reasoning_tokens: int | None = None

    def add(self, prompt: int, delta: OutputDelta) -> None:
        """Counts a delta of a prompt."""
        self.completion_tokens += len(delta.token_ids)
        known = self.cached_by_prompt.get(prompt, 0)
        self.cached_by_prompt[prompt] = max(known, delta.num_cached_tokens)
        if delta.times is not None:
            self.completion_time += delta.times.completion
            if delta.index == 0:
                self.prompt_time += delta.times.prompt

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from the prefix cache."""
        return sum(self.cached_by_prompt.values())

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.completion_tokens

    def as_json(self) -> dict[str, Any]:
        """Returns OpenAI's usage object, with the times and speeds added."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage | self.speeds()

    def speeds(self) -> dict[str, float]:
        """Returns seconds, and tokens per second: 0 where no time passed.

        Prompt tokens that were found in the prefix cache took no time and do not count.
        """
        computed = self.prompt_tokens - self.cached_tokens
        total_time = self.prompt_time + self.completion_time
        return {
            "avg_tok_per_sec": _rate(computed + self.completion_tokens, total_time),
            "avg_prompt_tok_per_sec": _rate(computed, self.prompt_time),
            "avg_compl_tok_per_sec": _rate(self.completion_tokens, self.completion_time),
            "total_time_sec": total_time,
            "total_prompt_time_sec": self.prompt_time,
            "total_completion_time_sec": self.completion_time,
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


class WholeAnswer(ABC):
    """An answer that is sent when it is complete.

    Attributes:
      requests: the engine requests, one per prompt.
      outputs: what the engine has made of each.
      is_large: to write its body takes so long that it is done beside the event loop.
      most_at_once: requests that the engine is given at a time; None for all.
    """

    is_large: bool = False
    most_at_once: int | None = None

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.requests = requests
        self.outputs = [
            RequestOutput.empty(item.request_id, None, item.prompt_token_ids, item.params.n)
            for item in requests
        ]
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in requests))

    def take(self, prompt: int, delta: OutputDelta) -> None:
        """Adds a delta of a prompt."""
        self.outputs[prompt].extend(delta)

    @abstractmethod
    def text(self) -> str:
        """Returns the JSON of the body, once all deltas are there."""


class Answer(WholeAnswer):
    """One generated answer under construction; streamed chunks and bodies come from the same parts.

    What is streamed are payloads, one JSON object each. `choice`s are the parts of them.

    Attributes:
      n: choices per prompt; choice i of prompt p has index p * n + i.
      invisible: token ids that never become text.
      names_events: each event has an `event:` line with the payload's `type`, and no [DONE] ends
        the stream.
    """

    id_prefix: str
    object_name: str
    chunk_object_name: str
    names_events: ClassVar[bool] = False

    def __init__(
        self,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        options: GenerationOptions,
        requests: Sequence[EngineRequest],
    ) -> None:
        super().__init__(requests)
        self.options = options
        self.n = options.params.n
        # Scores of a long prompt are thousands of entries.
        self.is_large = options.params.prompt_logprobs is not None
        self.tokenizer = tokenizer
        skips = options.params.skip_special_tokens
        self.invisible = tokenizer.special_ids if skips else frozenset()
        self._identity = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    @abstractmethod
    def opening(self) -> list[dict[str, Any]]:
        """Returns the choices sent before any text, one chunk each, in order."""

    @abstractmethod
    def delta(self, prompt: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Returns the choices that stream this delta, one chunk each."""

    @abstractmethod
    def choice(
        self,
        prompt: int,
        output: CompletionOutput,
        prompt_logprobs: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """Returns a complete choice."""

    def index(self, prompt: int, completion: int) -> int:
        """Returns the choice's index in the answer."""
        return prompt * self.n + completion

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Returns a chunk with one choice."""
        usage = self.usage.as_json() if self.options.continuous_usage else None
        return self._chunk([choice], usage)

    def closing(self) -> list[dict[str, Any]]:
        """Returns what is sent after the last delta: the usage, in a chunk without choices."""
        if not self.options.include_usage:
            return []
        return [self._chunk([], self.usage.as_json())]

    def failure(self, error: dict[str, Any]) -> dict[str, Any]:
        """Returns what is sent in place of the rest, given the body of an error."""
        return error

    def _chunk(self, choices: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
        return {
            **self._identity,
            "object": self.chunk_object_name,
            "choices": choices,
            "usage": usage,
        }

    def text(self) -> str:
        """Returns the JSON of an answer that is not streamed."""
        choices = [
            self.choice(prompt, completion, output.prompt_logprobs)
            for prompt, output in enumerate(self.outputs)
            for completion in output.outputs
        ]
        return dumps(self.body(choices))

    def body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed."""
        return {
            **self._identity,
            "object": self.object_name,
            "choices": choices,
            "usage": self.usage.as_json(),
        }

    def hidden(self, finish: CompletionOutput | OutputDelta) -> frozenset[int]:
        """Returns the ids without text: special ones, and the stop token that ended it."""
        if ended_by_token(finish):
            return self.invisible | {finish.token_ids[-1]}
        return self.invisible


def ended_by_token(finish: CompletionOutput | OutputDelta) -> bool:
    """Returns whether the last of its ids is the stop token that ended it."""
    is_stop = finish.finish_reason == "stop" and not isinstance(finish.stop_reason, str)
    return is_stop and bool(finish.token_ids)
