"""What a client saw of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(slots=True)
class RequestRecord:
    """One request, in seconds since the run began.

    Attributes:
      planned_s: when it was to be sent; in a closed loop, when it was.
      start_s: when it was sent.
      end_s: when its answer was complete, or failed.
      token_s: when each event with text came; a server may send several tokens in one.
      prompt_tokens, cached_tokens, output_tokens: as the server counts them.
      error: what went wrong, in a word: the status of the answer, "timeout", an exception's name.
      message: what the server or the exception said of it.
    """

    planned_s: float
    start_s: float
    end_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.token_s[0] - self.start_s if self.token_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: each gap between two events with text."""
        return [later - earlier for earlier, later in pairwise(self.token_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.output_tokens < 2 or not self.token_s:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.end_s - self.start_s

    def as_json(self) -> dict[str, Any]:
        """The request as `--json FILE` keeps it, seconds to the microsecond."""
        return {
            "planned_s": round(self.planned_s, 6),
            "start_s": round(self.start_s, 6),
            "end_s": round(self.end_s, 6),
            "token_s": [round(moment, 6) for moment in self.token_s],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "error": self.error,
            "message": self.message,
        }
