"""Attention over a paged key/value cache: `write` new keys and values, then `attend` to them.

Implementations: `reference` (the contract), `xla` (any backend), `cpu` (C++), Pallas kernels. To
add one, write its module with `supports`, `attend` and `write` and name it in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import jax
from jax import Array
from jaxtyping import Float, Int

from kernels import dispatch
from kernels.paged_attention.cache import (
    KVCache,
    KVDims,
    KVStruct,
    QuantizedKV,
    kv_dims,
    kv_dtype,
    kv_partition,
    kv_structs,
    quantize_kv,
)
from kernels.paged_attention.metadata import AttentionMetadata

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionMetadata",
    "KVCache",
    "KVDims",
    "KVStruct",
    "QuantizedKV",
    "attend",
    "choose",
    "kv_dims",
    "kv_dtype",
    "kv_partition",
    "kv_structs",
    "quantize_kv",
    "write",
]

IMPLEMENTATIONS = {
    "cpu": ("cpu", "xla", "reference"),
    "gpu": ("pallas_mosaic_gpu", "pallas_triton", "xla", "reference"),
    "tpu": ("pallas_tpu", "xla", "reference"),
}


def attend(
    q: Float[Array, "T N H"],
    kv: KVCache,
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
      kv: one layer's cache, as `kv_structs(...)` says.
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


def write(
    kv: KVCache,
    new_kv: Float[Array, "T K 2 H"],
    slot_mapping: Int[Array, "T"],
    *,
    platform: str,
    implementation: str | None = None,
) -> KVCache:
    """Returns the cache with token t's keys and values in slot `slot_mapping[t]`.

    `new_kv` is rounded to what the cache holds, by `quantize_kv` where it has scales. In place
    where `kv` is donated. Slots must lie inside the cache; of tokens that share one (padding, in
    page 0) any may stay there, in parts even. No other slot changes.

    Args:
      kv: one layer's cache, as `kv_structs(...)` says.
      new_kv: keys (0) and values (1) of this step's tokens.
      slot_mapping: `page * page_size + offset` of each token.
      platform: `cpu`, `gpu` or `tpu`, where this will run.
      implementation: the only one to consider; None for the best that supports the call.

    Raises:
      ValueError: the shapes disagree.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    dims = kv_dims(kv)
    expected = (*slot_mapping.shape, dims.num_kv_heads, 2, dims.head_dim)
    if slot_mapping.ndim != 1 or new_kv.shape != expected:
        raise ValueError(
            f"new_kv {new_kv.shape} with slot_mapping {slot_mapping.shape} does not fit a cache "
            f"of {dims}: pass [T, K, 2, H] and [T]"
        )
    # As for attention with as many query heads as there are KV heads.
    q = jax.ShapeDtypeStruct((new_kv.shape[0], dims.num_kv_heads, dims.head_dim), new_kv.dtype)
    module = choose(q, kv, platform=platform, implementation=implementation).module
    return module.write(kv, new_kv, slot_mapping)


def choose(
    q: Array | jax.ShapeDtypeStruct,
    kv: KVCache | KVStruct,
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
    kv: KVCache,
    metadata: AttentionMetadata,
    group: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    (num_tokens, num_heads, head_dim), dims = q.shape, kv_dims(kv)
    if head_dim != dims.head_dim or num_heads % dims.num_kv_heads:
        raise ValueError(
            f"q {q.shape} does not fit a cache of {dims}: for q [T, N, H] pass a cache of the "
            f"same head_dim where num_kv_heads divides N"
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
