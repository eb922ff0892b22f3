"""What both endpoints' answers have in common: identity, usage, and how choices are numbered."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.async_engine import EngineRequest
from jaxinfer.outputs import CompletionOutput, OutputDelta, TokenLogprob
from jaxinfer.server.parameters import GenerationOptions
from jaxinfer.text import Tokenizer


@dataclass
class Usage:
    """Token counts of an answer: each prompt once, every choice's output."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_by_prompt: dict[int, int] = field(default_factory=dict)

    def add(self, prompt: int, delta: OutputDelta) -> None:
        """Counts a delta of a prompt."""
        self.completion_tokens += len(delta.token_ids)
        known = self.cached_by_prompt.get(prompt, 0)
        self.cached_by_prompt[prompt] = max(known, delta.num_cached_tokens)

    def as_json(self) -> dict[str, Any]:
        """Returns OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_by_prompt.values())},
        }


class Answer(ABC):
    """One answer under construction; streamed chunks and whole bodies come from the same parts.

    Attributes:
      requests: the engine requests, one per prompt.
      n: choices per prompt; choice i of prompt p has index p * n + i.
      invisible: token ids that never become text.
    """

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(
        self,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        options: GenerationOptions,
        requests: Sequence[EngineRequest],
    ) -> None:
        self.requests = requests
        self.options = options
        self.n = options.params.n
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in requests))
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

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last chunk, which has the usage and no choice."""
        return self._chunk([], self.usage.as_json())

    def _chunk(self, choices: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
        return {
            **self._identity,
            "object": self.chunk_object_name,
            "choices": choices,
            "usage": usage,
        }

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
        ended_by_token = finish.finish_reason == "stop" and not isinstance(finish.stop_reason, str)
        if ended_by_token and finish.token_ids:
            return self.invisible | {finish.token_ids[-1]}
        return self.invisible
