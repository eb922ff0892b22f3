"""What guesses the tokens that come next of one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Drafter(Protocol):
    """Guesses for one sequence, of which it is told the tokens and what became of its guesses."""

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the sequence's next tokens."""

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Takes how many of its drafts were right, before the tokens that came of them."""

    @property
    def has_drafts(self) -> bool:
        """Whether it would propose any."""

    def propose(self, most: int) -> tuple[int, ...]:
        """Returns at most `most` tokens that may come next."""
