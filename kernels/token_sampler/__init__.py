"""Choose a token for each row of logits, by what the row asks for.

Implementations: `xla` (the contract, any backend) and `cpu` (C++, nothing but the rows that ask
for something is looked at). To add one, write its module with `supports(logits)` and
`choose_tokens(...)` and name it in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import jax
from jax import Array
from jaxtyping import Float32, Int32

from kernels import dispatch
from kernels.token_sampler.rows import SamplerRows, TokenMasks

__all__ = ["IMPLEMENTATIONS", "SamplerRows", "TokenMasks", "choose", "choose_tokens"]

IMPLEMENTATIONS = {"cpu": ("cpu", "xla"), "gpu": ("xla",), "tpu": ("xla",)}


def choose_tokens(
    logits: Float32[Array, "B V"],
    best: Int32[Array, " B"],
    rows: SamplerRows,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    masks: TokenMasks | None = None,
    *,
    platform: str,
    implementation: str | None = None,
) -> Int32[Array, " B"]:
    """Returns each row's token: shaped, then its best, or drawn at the row's uniform number.

    Bias, penalties, the ban on early stops and masks shape, in this order. Of what a temperature
    then divides, top-k, top-p over what top-k kept and min-p keep some; ties with the last token
    kept are kept. The draw is the first id whose cumulative weight, in the order of the vocabulary,
    exceeds the uniform number (see `xla.uniform`) times the total. Sums are of
    float32 or wider. Of a row with NaN or infinity it is some id.

    Args:
      best: the lowest id among the largest logits of each row, as `logit_stats` has it.
      rows: what rows ask for; `row_ids` says which of them each row of logits goes by.
      length: tokens that the row's sequence has before this one; the counter of its numbers.
      masks: which tokens are allowed; None allows all.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    module = choose(logits, platform=platform, implementation=implementation).module
    return module.choose_tokens(logits, best, rows, row_ids, length, masks, platform=platform)


def choose(
    logits: Array | jax.ShapeDtypeStruct, *, platform: str, implementation: str | None = None
) -> dispatch.Choice:
    """Returns what `choose_tokens` runs for such an array, with each refusal's reason.

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
