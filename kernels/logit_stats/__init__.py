"""What sampling asks of every row of logits: its best token, and what its probabilities sum to.

Implementations: `xla` (the contract, any backend) and `cpu` (C++, one pass for all three). To add
one, write its module with `supports(logits)` and `logit_stats(logits)` and name it in
`IMPLEMENTATIONS`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float32, Int32

from kernels import dispatch

__all__ = ["IMPLEMENTATIONS", "LogitStats", "choose", "logit_stats"]

IMPLEMENTATIONS = {"cpu": ("cpu", "xla"), "gpu": ("xla",), "tpu": ("xla",)}


class LogitStats(NamedTuple):
    """Per row of logits.

    Attributes:
      best: the lowest id among the largest logits; of a row with NaN some id.
      log_total: natural logarithm of the sum of exponentials; not finite if a logit is NaN or
        infinitely large.
    """

    best: Int32[Array, " B"]
    log_total: Float32[Array, " B"]


def logit_stats(
    logits: Float32[Array, "B V"], *, platform: str, implementation: str | None = None
) -> LogitStats:
    """Returns the statistics of each row.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    module = choose(logits, platform=platform, implementation=implementation).module
    return LogitStats(*module.logit_stats(logits))


def choose(
    logits: Array | jax.ShapeDtypeStruct, *, platform: str, implementation: str | None = None
) -> dispatch.Choice:
    """Returns what `logit_stats` runs for such an array, with each refusal's reason.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call.
    """
    return dispatch.choose(
        __name__,
        IMPLEMENTATIONS,
        platform=platform,
        requested=implementation,
        supports=lambda module: module.supports(logits),
    )
