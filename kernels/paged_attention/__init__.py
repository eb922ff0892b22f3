"""Attention over a paged key/value cache: `write` new keys and values, then `attend` to them.

Implementations: `reference` (the contract), `xla` (any backend). To add one, write its module
with `supports` and `attend` and name it in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import jax
from jax import Array
from jaxtyping import Float, Real

from kernels import dispatch
from kernels.paged_attention.cache import kv_dtype, kv_shape, write
from kernels.paged_attention.metadata import AttentionMetadata

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMetadata",
    "attend",
    "choose",
    "kv_dtype",
    "kv_shape",
    "write",
]

IMPLEMENTATIONS = {
    "cpu": ("xla", "reference"),
    "gpu": ("xla", "reference"),
    "tpu": ("xla", "reference"),
}


def attend(
    q: Float[Array, "T N H"],
    kv: Real[Array, "P page K 2 H"],
    metadata: AttentionMetadata,
    *,
    group: int,
    scale: float,
    platform: str,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of each query to its row's keys in the cache, new ones included.

    Query i of a row with q_len queries and kv_len keys sits at `pos = kv_len - q_len + i` and
    sees the keys `pos - window < j <= pos`. With `cap(x) = soft_cap * tanh(x / soft_cap)`:

        out[i, n] = sum_j softmax_j(cap(scale * q[i, n] . k[j, n // G])) v[j, n // G]

    Scores, softmax and sums are float32; only the result is rounded, to `q.dtype`. Tokens of no
    row give zeros. Cache slots that no query sees, NaN included, do not change the result.

    Args:
      q: queries; N is a multiple of K.
      kv: one layer's cache, of `kv_shape(...)` and `kv_dtype(...)`.
      metadata: the step's rows and pages.
      group: which of the metadata's KV groups this layer belongs to.
      scale: multiplies `q . k`; usually `H ** -0.5`.
      platform: `cpu`, `gpu` or `tpu`, where this will run.
      window: how many keys a query sees, its own included; None for all.
      soft_cap: bound of the scores' magnitude; None for no bound.
      implementation: the only one to consider; None for the best that supports the call.

    Raises:
      ValueError: shapes disagree, or `group`, `window` or `soft_cap` is out of range.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    _validate(q, kv, metadata, group, window, soft_cap)
    module = choose(q, kv, platform=platform, implementation=implementation).module
    return module.attend(
        q, kv, metadata, group=group, scale=scale, window=window, soft_cap=soft_cap
    )


def choose(
    q: Array | jax.ShapeDtypeStruct,
    kv: Array | jax.ShapeDtypeStruct,
    *,
    platform: str,
    implementation: str | None = None,
) -> dispatch.Choice:
    """Returns what `attend` runs for such arrays (shapes are enough), with each refusal's reason.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call.
    """
    return dispatch.choose(
        __name__,
        IMPLEMENTATIONS,
        platform=platform,
        requested=implementation,
        supports=lambda module: module.supports(q, kv),
    )


def _validate(
    q: Array,
    kv: Array,
    metadata: AttentionMetadata,
    group: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, two, cache_dim) = q.shape, kv.shape
    if head_dim != cache_dim or two != 2 or num_heads % num_kv_heads:
        raise ValueError(
            f"q {q.shape} does not fit a cache of shape {kv.shape}: for q [T, N, H] pass a cache "
            f"[P, page, K, 2, H] where K divides N"
        )
    num_groups, num_rows, _ = metadata.page_table.shape
    if not 0 <= group < num_groups:
        raise ValueError(f"group {group} is not one of the metadata's {num_groups} KV groups")
    shapes = {
        "kv_lens": (num_rows,),
        "cu_q_lens": (num_rows + 1,),
        "slot_mapping": (num_groups, num_tokens),
    }
    for name, shape in shapes.items():
        if getattr(metadata, name).shape != shape:
            raise ValueError(
                f"metadata.{name} has shape {getattr(metadata, name).shape}; for q {q.shape} and "
                f"page_table {metadata.page_table.shape} it must be {shape}"
            )
    if metadata.is_decode and num_tokens != num_rows:
        raise ValueError(
            f"a decode step has one token per row, not {num_tokens} tokens for {num_rows} rows: "
            f"pass metadata.is_decode=False"
        )
    if window is not None and window < 1:
        raise ValueError(f"window {window} must be at least 1 (the query's own key), or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap {soft_cap} must be positive, or None")
