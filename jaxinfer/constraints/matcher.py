"""Follows one completion through its grammar: which tokens may come next, and when it is over."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxinfer.token_masks import num_words

_NEVER = 2**63


class GrammarFailure(RuntimeError):
    """A completion that can follow its grammar no further; the message holds none of its text.

    Attributes:
      param: the request's parameter that cannot be followed; None where the fault is ours.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CompiledGrammar:
    """A grammar ready to be followed, by any number of completions at once.

    They share what its lexer has learned. One that fails may leave that unusable.

    Args:
      first: llguidance's matcher before the first token.
      vocab_size: ids that can be sampled.
      eos_token_ids: ids that end a completion.

    Attributes:
      is_spoiled: a completion has failed: others should not begin with it.
    """

    def __init__(self, first: Any, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._first = first
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.is_spoiled = False

    def first_state(self) -> Any:
        """Returns a copy of llguidance's matcher before the first token."""
        return self._first.deep_copy()


class GrammarMatcher:
    """One completion's place in its grammar.

    Args:
      grammar: that it follows.
      min_tokens: an end-of-sequence id comes earlier only where nothing else may come.
      ignore_eos: and later too.
      param: that asked for the grammar, for failures.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        min_tokens: int = 0,
        ignore_eos: bool = False,
        param: str = "grammar",
    ) -> None:
        self._grammar = grammar
        self._param = param
        self._matcher = grammar.first_state()
        self._num_tokens = 0
        self._min_tokens = _NEVER if ignore_eos else min_tokens
        # llguidance has an id more where the model has none that ends a sequence.
        num_ids = grammar.vocab_size + (not grammar.eos_token_ids)
        self._words = np.zeros((num_words(num_ids),), np.uint32)
        self._address = self._words.ctypes.data
        self._eos_words = np.zeros_like(self._words)
        for token_id in grammar.eos_token_ids:
            self._eos_words[token_id // 32] |= np.uint32(1 << token_id % 32)

    @property
    def is_complete(self) -> bool:
        """Whether the text matches, and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          GrammarFailure: it may not come here.
        """
        self._num_tokens += 1
        if not self._matcher.consume_token(token_id):
            raise self._failure()

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next: bit i of word w of `mask` is token 32·w + i.

        Raises:
          GrammarFailure: none may, or that takes too long to find out.
        """
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(self._address, words.nbytes)
        if self._matcher.is_error():  # its mask allows to end
            raise self._failure()
        if self._num_tokens < self._min_tokens:
            others = words & ~self._eos_words
            if others.any():
                words = others
        mask[...] = words[: len(mask)]
        if not mask.any():
            message = "by the grammar none of the model's tokens may come next"
            raise GrammarFailure(message, self._param)

    def _failure(self) -> GrammarFailure:
        self._grammar.is_spoiled = True
        why = self._matcher.get_error().partition("<")[0].strip()
        if "token" in why:  # which it would quote
            return GrammarFailure("a token was sampled that by the grammar may not come next")
        return GrammarFailure(f"the grammar can be followed no further: {why}", self._param)
