"""One completion being generated: its tokens, how far they are computed, and the pages it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from jaxinfer.scheduler.drafter import Drafter

SequenceFinish = Literal["stop", "length", "abort", "error"]


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StopRule:
    """When the device and the scheduler end a sequence without looking at its text.

    Attributes:
      max_tokens: output tokens at most; 0 only scores the prompt.
      min_tokens: stop ids end nothing before this many output tokens.
      stop_ids: end-of-sequence and stop token ids.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()


@dataclass(eq=False, slots=True)
class Sequence:
    """The scheduler's view of one completion.

    Positions, with `num_tokens = len(token_ids) + num_in_flight`:

        [0, num_computed)           in the cache, or dispatched to be
        [num_computed, num_tokens)  to compute next
        [len(token_ids), num_tokens) sampled by a dispatched step, ids not yet known to the host

    Attributes:
      seq_id: unique name.
      token_ids: prompt and confirmed output.
      prompt_len: how many of them are the prompt.
      stop: the rule that ends it.
      priority: lower runs first.
      logprobs: alternatives to report beside each sampled token's log-probability; None where no
        log-probability is wanted.
      prompt_logprobs: the same of the prompt's tokens.
      embeds: the hidden state of the last prompt token is wanted.
      steps_in_bulk: several decode steps may be dispatched as one (no stop strings).
      drafter: guesses what comes next; None where nothing is to be guessed.
      cache_salt: sequences share cached pages only with those that have the same.
      num_confirmed: positions of [0, num_computed) whose computation the host has seen succeed.
      num_scored: prompt positions whose log-probabilities were already dispatched.
      pages: physical page per logical page, for each KV group; 0 where a window has moved past.
      row: the slot in the device's row state while running.
      is_verifying: a step with drafts of it is in flight: how far it gets is not known yet.
      num_admissions: how often it began to run.
      num_cached: tokens that were in the prefix cache when it first began to run.
      page_keys: keys of its first full pages, as far as they were needed.
      awaited_key: key of the page that it waits for another sequence to compute.
    """

    seq_id: str
    token_ids: list[int]
    prompt_len: int
    stop: StopRule
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    embeds: bool = False
    steps_in_bulk: bool = True
    drafter: Drafter | None = None
    cache_salt: bytes = b""
    arrival: int = 0
    num_computed: int = 0
    num_confirmed: int = 0
    num_in_flight: int = 0
    num_scored: int = 0
    pages: list[list[int]] = field(default_factory=list)
    row: int = -1
    is_verifying: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: SequenceFinish | None = None
    stop_token: int | None = None
    num_preemptions: int = 0
    num_admissions: int = 0
    num_cached: int = 0
    page_keys: list[bytes] = field(default_factory=list)
    awaited_key: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens it has, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def computes_all(self) -> bool:
        """Whether nothing of it is to be taken from a prefix cache."""
        return self.scores_prompt or self.embeds

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted."""
        return self.prompt_logprobs is not None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those in flight included."""
        return self.num_tokens - self.prompt_len

    @property
    def max_num_tokens(self) -> int:
        """Tokens it may come to have."""
        return self.prompt_len + self.stop.max_tokens

    @property
    def num_remaining(self) -> int:
        """Output tokens that may still be sampled."""
        return self.stop.max_tokens - self.num_output_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only its last sampled token is left to compute."""
        return self.num_output_tokens > 0 and self.num_computed == self.num_tokens - 1

    def decode_steps(self, most: int) -> int:
        """Decode steps that can be planned now, `most` at most; 0 unless it is decoding."""
        # Asked of every row in every step: the properties would take three times as long.
        num_tokens = len(self.token_ids) + self.num_in_flight
        num_output = num_tokens - self.prompt_len
        if num_output <= 0 or self.num_computed != num_tokens - 1 or self.is_verifying:
            return 0
        left = self.stop.max_tokens - num_output
        return most if most <= left else max(0, left)

    @property
    def has_drafts(self) -> bool:
        """Whether there are guesses for more than one of the tokens to be sampled."""
        return self.drafter is not None and self.num_remaining > 1 and self.drafter.has_drafts

    @property
    def order(self) -> tuple[int, int]:
        """First come, first served within a priority."""
        return (self.priority, self.arrival)
