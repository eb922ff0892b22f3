"""What the engine reports: one stream of deltas, folded into whole outputs by whoever wants those.

A leaf: imports nothing of ours and no jax.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token under the raw logits, and of the best alternatives.

    Attributes:
      token_id: the token that was chosen, or the prompt token that was scored.
      logprob: its natural log-probability.
      top: (token id, log-probability), best first; as many as were asked for.
      rank: how many tokens are more probable, plus 1; None if no alternatives were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long the phases of one completion took, in seconds of a monotonic clock.

    Attributes:
      prompt: from when it began to run, after any wait, to the results of its prompt's last step.
      completion: from there to the results of its own last step.
    """

    prompt: float = 0.0
    completion: float = 0.0


# Made for every row of every step: frozen, it would take three times as long.
@dataclass(slots=True)
class OutputDelta:
    """What one engine step added to one completion of a request.

    Attributes:
      request_id: the request.
      index: which of its n completions.
      text: new text; may be empty while a character or a stop string is still open.
      token_ids: new token ids (a stop token's id is included, its text is not).
      logprobs: one entry per id of `token_ids`, if asked for.
      finish_reason: set on the last delta of this completion.
      stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
      prompt_logprobs: on the first delta of index 0 only, if asked for; entry 0 is None.
      num_cached_tokens: prompt tokens taken from the prefix cache; of index 0, whose siblings
        find what it has computed.
      error: what went wrong, with `finish_reason == "error"`.
      error_param: the request's parameter that cannot be followed; None where the fault is ours.
      times: on the last delta of a completion that came to its own end.
      hidden: the final hidden state of the prompt's last token, on the last delta of a request
        that `embeds`.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    times: PhaseTimes | None = field(default=None, compare=False)
    hidden: array[float] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt; `times` is None where it did not come to its own end."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    times: PhaseTimes | None = field(default=None, compare=False)

    def extend(self, delta: OutputDelta) -> None:
        """Appends a delta of the same completion."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error
            self.times = delta.times


@dataclass(slots=True)
class RequestOutput:
    """A request with all of its completions.

    Attributes:
      request_id: the request.
      prompt: its text, if it was given as text.
      prompt_token_ids: its token ids.
      outputs: n completions, by index.
      prompt_logprobs: one entry per prompt token, entry 0 None, if asked for.
      num_cached_tokens: prompt tokens taken from the prefix cache.
      hidden: the final hidden state of the prompt's last token, of a request that `embeds`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    hidden: array[float] | None = None

    @classmethod
    def empty(
        cls, request_id: str, prompt: str | None, prompt_token_ids: Iterable[int], n: int
    ) -> RequestOutput:
        """Returns an output that deltas can be added to."""
        outputs = [CompletionOutput(index) for index in range(n)]
        return cls(request_id, prompt, list(prompt_token_ids), outputs)

    def extend(self, delta: OutputDelta) -> None:
        """Adds one delta of this request."""
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.hidden is not None:
            self.hidden = delta.hidden
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.outputs[delta.index].extend(delta)

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)
