"""What a step computed, read from the device and told apart by row."""

from __future__ import annotations

from array import array
from typing import Any

import jax
import numpy as np

from jaxinfer.outputs import TokenLogprob
from jaxinfer.runner.programs import NOT_EMITTED, NOT_FINITE, StepOutput
from jaxinfer.scheduler.plan import RowResult

Entry = tuple[tuple[int, ...], int]
"""Where in the output arrays, and the token scored there or -1 for one that was sampled.

(row, step) where every row decodes, else (logit row,).
"""


class OutputReader:
    """Host copies of a step's output, fetched when first needed."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._has_steps = output.token.ndim == 2
        # Lists: to take one number out of an array takes ten times as long.
        self._token: list[Any] = self._fetch(output.token).tolist()
        self._logprobs: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None
        self._hidden: np.ndarray | None = None

    def sampled(self, index: int, num_steps: int) -> RowResult:
        """Reads a row of a decode step that wants no log-probabilities, as most of them."""
        ids = self._token[index][:num_steps]
        if min(ids) >= 0:
            return RowResult(ids)
        return RowResult([one for one in ids if one >= 0], finite=NOT_FINITE not in ids)

    def row(
        self,
        entries: list[Entry],
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
    ) -> RowResult:
        """Reads the entries of one planned row; for what it wants see `Sequence`."""
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
                scored.append(self._logprob(where, num_prompt_logprobs or 0))
                continue
            tokens.append(token)
            if num_logprobs is not None:
                logprobs.append(self._logprob(where, num_logprobs))
        return RowResult(tokens, None if num_logprobs is None else logprobs, scored, finite)

    def hidden(self, index: int) -> array[float]:
        """Returns the hidden state of the row planned as number `index`."""
        if self._hidden is None:
            self._hidden = np.asarray(self._output.hidden)
        return array("f", self._hidden[index].tobytes())

    def _fetch(self, leaf: jax.Array) -> np.ndarray:
        """Returns a host copy, what belongs to one row side by side: steps come one by one."""
        return np.asarray(leaf).swapaxes(0, 1) if self._has_steps else np.asarray(leaf)

    def _token_at(self, where: tuple[int, ...]) -> int:
        token: Any = self._token
        for index in where:
            token = token[index]
        return int(token)

    def _logprob(self, where: tuple[int, ...], count: int) -> TokenLogprob:
        if self._logprobs is None:
            output = self._output
            self._logprobs = (
                self._fetch(output.logprob),
                self._fetch(output.top_ids),
                self._fetch(output.top_logprobs),
                self._fetch(output.rank),
            )
        logprob, top_ids, top_logprobs, rank = self._logprobs
        top = zip(
            top_ids[where][:count].tolist(), top_logprobs[where][:count].tolist(), strict=True
        )
        # Where others of the step have asked for alternatives there is one, too.
        known = int(rank[where]) if count else None
        return TokenLogprob(self._token_at(where), float(logprob[where]), tuple(top), known)
