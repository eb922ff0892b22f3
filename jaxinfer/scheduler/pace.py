"""How much of a prompt is computed beside decodes, so that streams go on at nearly their pace."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_TOKENS = 16
"""The first prompt advances by so many tokens in a step whatever came before them."""


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """What part of a prompt takes how long, in tokens of its beginning.

    A token takes the longer the more keys it attends to, and a step that decodes many rows may take
    the longer before one of them notices.

    Attributes:
      tokens: of a prompt in a step beside however few decodes.
      tokens_per_decode: more for each row that decodes.
      keys: so many keys that are attended to in every layer take as long as the rest of a token.
      windows: of each layer, the keys a query sees at most; None for all.
    """

    tokens: float
    tokens_per_decode: float
    keys: float
    windows: tuple[int | None, ...]

    def of_step(self, num_decodes: int) -> float:
        """What a step that decodes so many rows has time for."""
        return self.tokens + self.tokens_per_decode * num_decodes

    def num_tokens(self, position: int, work: float) -> int:
        """Tokens from a position on that may be computed, while there is time at all."""
        return max(LEAST_TOKENS, int(work / self.of_token(position)))

    def of_token(self, position: int) -> float:
        """What one token of a prompt takes."""
        seen = sum(position if w is None else min(position, w) for w in self.windows)
        return 1 + seen / (len(self.windows) * self.keys)
