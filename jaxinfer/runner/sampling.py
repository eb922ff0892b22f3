"""From logits to a token, on the device: choose it, report log-probabilities.

Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.runner.row_state import RowState
from jaxinfer.sampling_params import MAX_LOGPROBS
from kernels.logit_stats import logit_stats
from kernels.token_sampler import SamplerRows, TokenMasks, choose_tokens
from kernels.token_sampler.rows import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What one step reports per row.

    Attributes:
      token: the chosen token, or the target that was scored.
      logprob: its natural log-probability under the raw logits.
      rank: how many tokens have a larger raw logit, plus 1.
      top_ids, top_logprobs: the best tokens of the raw logits, best first.
      finite: whether the raw logits were all finite.
    """

    token: Leaf  # int32 [*B]
    logprob: Leaf  # float32 [*B]
    rank: Leaf  # int32 [*B]
    top_ids: Leaf  # int32 [*B, top]
    top_logprobs: Leaf  # float32 [*B, top]
    finite: Leaf  # bool [*B]


def report(
    raw: Float32[Array, "B V"],
    log_total: Float32[Array, " B"],
    token: Int32[Array, " B"],
    wants_top: Bool[Array, ""],
) -> Sampled:
    """Log-probabilities of `token` and of the best tokens under the raw logits, and its rank.

    Of the best tokens, and of the rank, there are zeros unless they are wanted.
    """
    chosen = jnp.take_along_axis(raw, token[:, None], axis=1)[:, 0]
    shape = (raw.shape[0], MAX_LOGPROBS)

    def best(_: None) -> tuple[Float32[Array, "B _"], Int32[Array, "B _"], Int32[Array, " B"]]:
        count = min(MAX_LOGPROBS, raw.shape[1])
        values, ids = lax.top_k(raw, count)
        padding = ((0, 0), (0, MAX_LOGPROBS - count))
        logprobs = values - log_total[:, None]
        return (
            jnp.pad(logprobs, padding, constant_values=-jnp.inf),
            jnp.pad(ids.astype(jnp.int32), padding),
            1 + jnp.sum((raw > chosen[:, None]).astype(jnp.int32), axis=1),
        )

    def nothing(_: None) -> tuple[Float32[Array, "B _"], Int32[Array, "B _"], Int32[Array, " B"]]:
        ids = jnp.zeros(shape, jnp.int32)
        return jnp.zeros(shape, jnp.float32), ids, jnp.zeros(token.shape, jnp.int32)

    top_logprobs, top_ids, rank = lax.cond(wants_top, best, nothing, None)
    return Sampled(
        token=token,
        logprob=chosen - log_total,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finite=jnp.isfinite(log_total),
    )


# Programs of one number of rows trace and lower it once.
@partial(jax.jit, static_argnames="platform")
def sample(
    raw: Float32[Array, "B V"],
    state: RowState,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    target: Int32[Array, " B"],
    wants_top: Bool[Array, ""],
    platform: str,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Chooses a token per row, or scores `target` where it is not -1.

    `length` is the number of tokens the row's sequence has before the token in question; it is
    also the counter of the row's random numbers.
    """
    stats = logit_stats(raw, platform=platform)
    rows = SamplerRows(
        state.reals,
        state.integers,
        state.stop_ids,
        state.bias_ids,
        state.bias_values,
        state.counts,
    )
    token = choose_tokens(raw, stats.best, rows, row_ids, length, masks, platform=platform)
    token = jnp.where(target >= 0, target, token)
    return report(raw, stats.log_total, token, wants_top)
