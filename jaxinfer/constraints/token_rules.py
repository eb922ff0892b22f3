"""What a completion may sample beside its grammar: some tokens only, and no words that are banned.

A word is banned as the tokens that the tokenizer makes of it, with a space before it and without:
its last one is not sampled where the others stand before. Other tokens may spell it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.constraints.matcher import GrammarFailure
from jaxinfer.request import TokenMatcher
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.token_masks import num_words


class TokenRules:
    """One completion's rules; it may follow a grammar as well.

    Args:
      allowed: ids that may be sampled; None for all.
      words: the tokens of each banned word.
      vocab_size: ids that can be sampled.
      stop_ids: ids that end it, which do not come before it has `min_tokens`.
      min_tokens: of its output.
      grammar: what it follows, too.
    """

    def __init__(
        self,
        allowed: Iterable[int] | None,
        words: Iterable[Sequence[int]],
        vocab_size: int,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        grammar: TokenMatcher | None = None,
    ) -> None:
        self._param = "bad_words" if allowed is None else "allowed_token_ids"
        # A tokenizer may know ids that the model does not.
        words = [tuple(word) for word in words if max(word) < vocab_size]
        single = [word[0] for word in words if len(word) == 1]
        self._mask = ~_bits(single, vocab_size)
        if allowed is not None:
            self._mask &= _bits(allowed, vocab_size)
        self._words = [word for word in words if len(word) > 1]
        self._reach = max((len(word) - 1 for word in self._words), default=0)
        self._not_stops = ~_bits(stop_ids, vocab_size)
        self._min_tokens = min_tokens
        self._grammar = grammar
        self._num_tokens = 0
        self._last: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Iterable[int],
        grammar: TokenMatcher | None,
    ) -> TokenMatcher | None:
        """Returns what a completion with such settings must follow: rules, or its grammar alone."""
        if params.allowed_token_ids is None and not params.bad_words:
            return grammar
        texts = [space + word.lstrip() or word for word in params.bad_words for space in ("", " ")]
        words = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        ids = params.allowed_token_ids
        return cls(ids, filter(None, words), vocab_size, stop_ids, params.min_tokens, grammar)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, by the grammar."""
        return self._grammar is not None and self._grammar.is_complete

    def advance(self, token_id: int) -> None:
        """Takes the next token.

        Raises:
          GrammarFailure: by the grammar it may not come here.
        """
        self._num_tokens += 1
        if self._reach:
            self._last = (*self._last, token_id)[-self._reach :]
        if self._grammar is not None:
            self._grammar.advance(token_id)

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next: bit i of word w of `mask` is token 32·w + i.

        Raises:
          GrammarFailure: none may.
        """
        if self._grammar is None:
            mask[...] = self._mask
        else:
            self._grammar.fill(mask)
            mask &= self._mask
        for *before, last in self._words:
            if self._last[-len(before) :] == tuple(before):
                mask[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        is_early = self._grammar is None and self._num_tokens < self._min_tokens
        if not (mask & self._not_stops if is_early else mask).any():
            message = "allowed_token_ids and bad_words leave no token to come next"
            message += " that the grammar allows" if self._grammar is not None else ""
            raise GrammarFailure(message, self._param)


def _bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns a mask of these ids."""
    bits = np.zeros((32 * num_words(vocab_size),), np.uint8)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
