"""One request as the engine takes it, and the text state of each of its completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxinfer.outputs import FinishReason, OutputDelta, PhaseTimes, TokenLogprob
from jaxinfer.sampling_params import SamplingParams


class QueueFullError(RuntimeError):
    """Too many requests wait; try again later."""


UNSATISFIABLE = "unsatisfiable_constraint"
"""The code of a request whose parameters leave no token to come next, now or later."""


class EngineDeadError(RuntimeError):
    """The engine stopped; no request can be served any more."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and how to continue it.

    Attributes:
      request_id: unique among the requests in flight.
      prompt_token_ids: at least one id.
      params: sampling settings; None for seed draws one, None for max_tokens fills the context.
      priority: lower runs first.
      arrival_time: monotonic seconds.
      cache_salt: cached prefixes are shared only with requests that have the same.
      embeds: nothing is generated; the final hidden state of the prompt's last token is reported.
        Its `params` are those of `EMBEDDING`.
      compiled: what checking has made of the grammar, so that whoever takes the request need not.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    cache_salt: str | None = None
    embeds: bool = False
    compiled: list[Any] = field(default_factory=list, repr=False, compare=False)


EMBEDDING = SamplingParams(max_tokens=0, temperature=0.0)
"""The settings of a request that `embeds`."""


@runtime_checkable
class TextStream(Protocol):
    """Token ids to text, a complete character at a time."""

    def push(self, token_id: int) -> str:
        """Returns the text this id completes."""

    def flush(self) -> str:
        """Returns what is left at the end."""


@runtime_checkable
class StopStrings(Protocol):
    """Holds back text that might become a stop string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is safe to show, the stop string that matched)."""

    def flush(self) -> str:
        """Returns what was held back."""


@runtime_checkable
class TokenMatcher(Protocol):
    """Says which tokens may come next, and when the text is complete."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""

    def advance(self, token_id: int) -> None:
        """Takes the next token."""

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next, a bit for each."""


@dataclass(slots=True)
class Completion:
    """The text side of one completion, from sampled ids to the deltas a client sees."""

    request_id: str
    index: int
    params: SamplingParams
    text: TextStream
    stops: StopStrings
    matcher: TokenMatcher | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    has_prompt: bool = False  # it has begun to generate
    began_at: float | None = None  # monotonic seconds
    prompt_ended_at: float = 0.0
    reports_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reports_prompt = self.index == 0 and self.params.prompt_logprobs is not None

    def delta(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprob] | None,
        finish_reason: FinishReason | None,
        stop_token: int | None,
    ) -> OutputDelta:
        """Returns what these ids add; its `finish_reason` tells whether a stop string matched.

        `stop_token` is the last id if that ended the completion: its text is left out.
        """
        if finish_reason is None and not self.params.stop and len(token_ids) == 1:
            # Nearly every delta: one token, of which nothing is held back and which ends nothing.
            return OutputDelta(
                self.request_id,
                self.index,
                self.text.push(token_ids[0]),
                tuple(token_ids),
                None if logprobs is None else tuple(logprobs),
                None,
                None,
                self._take_prompt_logprobs() if self.reports_prompt else None,
                self.num_cached_tokens,
            )
        pieces: list[str] = []
        matched: str | None = None
        taken = 0
        for taken, token_id in enumerate(token_ids, start=1):
            if token_id == stop_token and taken == len(token_ids):
                continue
            piece, matched = self.stops.push(self.text.push(token_id))
            pieces.append(piece)
            if matched is not None:
                break
        if matched is None and finish_reason is not None:
            piece, matched = self.stops.push(self.text.flush())
            pieces.append(piece)
            if matched is None:
                pieces.append(self.stops.flush())
        stop_reason: str | int | None = matched
        if matched is None and stop_token in self.params.stop_token_ids:
            stop_reason = stop_token
        return OutputDelta(
            request_id=self.request_id,
            index=self.index,
            text="".join(pieces),
            token_ids=tuple(token_ids[:taken]),
            logprobs=None if logprobs is None else tuple(logprobs[:taken]),
            finish_reason="stop" if matched is not None else finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=self._take_prompt_logprobs(),
            num_cached_tokens=self.num_cached_tokens,
        )

    def ended(
        self, reason: FinishReason, error: str | None = None, error_param: str | None = None
    ) -> OutputDelta:
        """Returns the last delta of a completion that was cut short."""
        return OutputDelta(
            self.request_id,
            self.index,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
            error=error,
            error_param=error_param,
        )

    def times(self, now: float) -> PhaseTimes:
        """Returns what its phases took, of a completion whose prompt is done and that ends now."""
        began_at = self.prompt_ended_at if self.began_at is None else self.began_at
        return PhaseTimes(self.prompt_ended_at - began_at, now - self.prompt_ended_at)

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if not (self.reports_prompt and self.has_prompt):
            return None
        self.reports_prompt = False
        return (None, *self.prompt_logprobs)
