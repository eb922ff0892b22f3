"""Ladders of padded sizes: every program is compiled once per rung and nothing else is ever run."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MAX_CPU_PROGRAMS = 8
MAX_PROGRAMS = 24

VERIFY_TOKENS = {"cpu": 16, "gpu": 256, "tpu": 256}
"""Tokens up to which a step with drafts takes little longer than one without.

A CPU takes 5.0 ms for a token of SmolLM2-135M Q4_1, and 7.7, 9.2 and 14.2 ms for 4, 8 and 16 in a
step of 16; a step of 64 takes 10.1 and 11.2 ms for 4 and 8, and rounds what it multiplies otherwise
than decodes do, so that other text may come out.
"""

LANES = 16
"""Loops of XLA:CPU go in steps that divide this; what is left over they round otherwise.

In jax 0.12 the fifth of five rows, alike or not, had other last bits than the first four.
"""


@dataclass(frozen=True, slots=True)
class Ladders:
    """The rungs of each kind of step, ascending; the last holds the limit.

    Attributes:
      decode: rows of a decode step.
      tokens: tokens of a ragged step.
      bulk: those of `decode` that have a program of several steps too.
    """

    decode: tuple[int, ...]
    tokens: tuple[int, ...]
    bulk: tuple[int, ...] = ()

    def decode_rung(self, num_rows: int) -> int:
        """Smallest decode rung that holds `num_rows`."""
        return _rung(self.decode, num_rows)

    def token_rung(self, num_tokens: int) -> int:
        """Smallest ragged rung that holds `num_tokens`."""
        return _rung(self.tokens, num_tokens)


def make_ladders(
    platform: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    bulk_rows: int = 0,
    verifies: bool = False,
    one_rung: bool = False,
) -> Ladders:
    """Returns the ladders of a platform; up to `bulk_rows` rows may decode several steps at once.

    CPU steps start at two rows (XLA:CPU computes one row 10-50 times slower than two) and widen
    faster, and ragged steps start at 64 tokens, because each program costs about 50 MB and a second
    of every start there. The rung between is sixteen: up to there weights are multiplied as they
    are, beyond they are decoded first (SmolLM2-135M Q4_1 on two cores of a Zen 4: 16 rows take
    23 ms in a step of 16 and 29 in one of 64; 8 rows 13 in one of 16 and 12.5 in one of 8). One
    that `verifies` drafts has a smaller one for them. With `one_rung` a step of any size is padded
    to the limit: its bits do not depend on its size, nor, as the limit is a multiple of `LANES`, on
    a row's place in it.
    """
    is_cpu = platform == "cpu"
    if one_rung:
        rows, tokens = (
            -(-limit // LANES) * LANES for limit in (max_num_seqs, max_num_batched_tokens)
        )
        return Ladders((rows,), (tokens,))
    limit = MAX_CPU_PROGRAMS if is_cpu else MAX_PROGRAMS
    first, ratio, most = (2, 8, 3) if is_cpu else (1, 2, 10)
    decode = _geometric(first, ratio, max_num_seqs, most)
    if bulk_rows > decode[0]:
        # Every decode rung may need two programs.
        decode = _geometric(first, ratio, max_num_seqs, 2 if is_cpu else 7)
    highest = _rung(decode, min(bulk_rows, decode[-1])) if bulk_rows else 0
    bulk = tuple(rung for rung in decode if rung <= highest)
    # One program more resets rows.
    limit -= 1 + len(decode) + len(bulk)
    first = VERIFY_TOKENS["cpu"] if verifies else 64
    first = max(2, min(first, max_num_batched_tokens)) if is_cpu else 16
    return Ladders(decode, _geometric(first, 4, max_num_batched_tokens, max(2, limit)), bulk)


def _geometric(first: int, ratio: int, last: int, limit: int) -> tuple[int, ...]:
    """first, first·ratio, ... and exactly `last`; at most `limit` rungs.

    A `last` below `first` is padded to `first`, the only rung then.
    """
    rungs = []
    rung = first
    while rung < last:
        rungs.append(rung)
        rung *= ratio
    rungs.append(max(last, first))
    while len(rungs) > limit:
        # Dropping the rung just under the largest ratio sum wastes least: keep both ends.
        gaps = [rungs[i + 1] / rungs[i - 1] for i in range(1, len(rungs) - 1)]
        rungs.pop(1 + gaps.index(min(gaps)))
    return tuple(rungs)


def _rung(ladder: tuple[int, ...], size: int) -> int:
    index = bisect.bisect_left(ladder, size)
    if index == len(ladder):
        raise ValueError(f"a step of {size} is above the top rung {ladder[-1]}")
    return ladder[index]
