"""What llguidance has to know of a model's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from jaxinfer.text.tokenizer import Tokenizer

_SENTINEL = "\n"
"""Put before a text, it keeps an encoder from adding a space to it."""

_MOST_CHARACTERS = 500
"""Of a text that must come next. llguidance asks at each token, and of what it is told uses the
first."""


class Vocabulary:
    """The tokens of a model by their bytes, in which its text is what it is for our detokenizer.

    Args:
      tokenizer: of the model.
      size: ids that can be sampled.
      eos_token_ids: ids that end a completion; those outside `size` are left out.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self.eos_token_ids = sorted(token for token in eos_token_ids if token < size)

    @cached_property
    def outline(self) -> dict[str, Any]:
        """As `Trials` wants it."""
        special = {
            token_id: self._tokenizer.token_bytes(token_id).decode(errors="replace")
            for token_id in sorted(self._tokenizer.special_ids)
            if token_id < self._size
        }
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        return {"size": self._size, "special": special, "eos": eos}

    @cached_property
    def tokenizer(self) -> Any:
        """The llguidance.LLTokenizer.

        Making it takes 0.1 s for 49,000 tokens and 1.1 s for 262,000, in which no other thread runs
        Python: llguidance lets go of the interpreter where it compiles a grammar, but not here.
        """
        import llguidance

        encoder = _Encoder(self._tokenizer, self._size, self.eos_token_ids)
        made = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(encoder), eos_token=self.eos_token_ids or None
        )
        encoder.greedy = made.greedy_tokenize
        return made


class _Encoder:
    """The attributes and the call that llguidance.TokenizerWrapper asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_token_ids: list[int]) -> None:
        self._encode = tokenizer.encode
        self._special = tokenizer.special_ids
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = [token for token in tokenizer.special_ids if token < size]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.greedy: Any = lambda text: []

    def __call__(self, text: str) -> list[int]:
        """Returns ids as the model expects them of a text that must come next, or of its start."""
        text = text[:_MOST_CHARACTERS]
        data = text.encode()
        for prefix in ("", _SENTINEL):
            ids = self._encode(prefix + text, add_special_tokens=False)
            for first in range(3):
                if self._spelled(ids[first:]) == data:
                    return ids[first:]
        return list(self.greedy(text))

    def _spelled(self, ids: list[int]) -> bytes | None:
        if self._special.intersection(ids) or max(ids, default=0) >= len(self.tokens):
            return None
        return b"".join(self.tokens[token_id] for token_id in ids)
