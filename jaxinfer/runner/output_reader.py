"""What a step computed, read from the device and told apart by row."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.outputs import TokenLogprob
from jaxinfer.runner.programs import NOT_EMITTED, NOT_FINITE, StepOutput


# Made for every row of every step: frozen, it would take three times as long.
@dataclass(slots=True)
class RowResult:
    """What a step produced for one planned row.

    Attributes:
      token_ids: sampled ids, oldest first.
      logprobs: one per sampled id, if asked for.
      prompt_logprobs: one per scored prompt position, in order.
      finite: false if the model's logits, or its hidden state, were not.
      hidden: the final hidden state of the row's last token, if asked for.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob]
    finite: bool
    hidden: array[float] | None = None


Entry = tuple[tuple[int, ...], int]
"""Where in the output arrays, and the token scored there or -1 for one that was sampled."""


class OutputReader:
    """Host copies of a step's output, fetched when first needed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        # Lists: to take one number out of an array takes ten times as long.
        self._token: list[Any] = np.asarray(output.token).tolist()
        self._logprobs: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
        self._hidden: np.ndarray | None = None

    def sampled(self, index: int, num_steps: int) -> RowResult:
        """Reads a row of a decode step that wants no log-probabilities, as most of them."""
        ids = [of_step[index] for of_step in self._token[:num_steps]]
        return RowResult([one for one in ids if one >= 0], None, [], NOT_FINITE not in ids)

    def row(
        self,
        entries: list[Entry],
        num_output_logprobs: int,
        num_prompt_logprobs: int,
    ) -> RowResult:
        """Reads the entries of one planned row: (where, scored token or -1)."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        scored: list[TokenLogprob] = []
        finite = True
        for where, target in entries:
            token = self._token_at(where)
            if token == NOT_FINITE:
                finite = False
            if token in (NOT_EMITTED, NOT_FINITE):
                continue
            if target >= 0:
                scored.append(self._logprob(where, num_prompt_logprobs))
                continue
            tokens.append(token)
            if num_output_logprobs >= 0:
                logprobs.append(self._logprob(where, num_output_logprobs))
        return RowResult(tokens, logprobs if num_output_logprobs >= 0 else None, scored, finite)

    def hidden(self, index: int) -> array[float]:
        """Returns the hidden state of the row planned as number `index`."""
        if self._hidden is None:
            self._hidden = np.asarray(self._output.hidden)
        return array("f", self._hidden[index].tobytes())

    def _token_at(self, where: tuple[int, ...]) -> int:
        token: Any = self._token
        for index in where:
            token = token[index]
        return int(token)

    def _logprob(self, where: tuple[int, ...], count: int) -> TokenLogprob:
        if self._logprobs is None:
            output = self._output
            self._logprobs = (
                np.asarray(output.logprob),
                np.asarray(output.top_ids),
                np.asarray(output.top_logprobs),
                np.asarray(output.rank),
            )
        logprob, top_ids, top_logprobs, rank = self._logprobs
        top = zip(
            top_ids[where][:count].tolist(), top_logprobs[where][:count].tolist(), strict=True
        )
        # Where others of the step have asked for alternatives there is one, too.
        known = int(rank[where]) if count else None
        return TokenLogprob(self._token_at(where), float(logprob[where]), tuple(top), known)
