"""Paged attention as its formula reads, in float32: the contract for every other implementation.

Never tuned: it gathers whole page tables and scores every token against every row's keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Real

from kernels.paged_attention.cache import decode
from kernels.paged_attention.metadata import AttentionMetadata

MASKED = -1e30  # finite: a row of -inf would make softmax NaN


def supports(q: Array | jax.ShapeDtypeStruct, kv: Array | jax.ShapeDtypeStruct) -> None:
    """Refuses caches whose elements alone do not say which values they stand for."""
    del q  # of any floating point dtype
    if not jnp.issubdtype(kv.dtype, jnp.floating) and kv.dtype != jnp.uint16:
        raise NotImplementedError(f"a cache of {kv.dtype} needs scales")


def attend(
    q: Float[Array, "T N H"],
    kv: Real[Array, "P page K 2 H"],
    metadata: AttentionMetadata,
    *,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attends row by row; see `kernels.paged_attention.attend`."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[2]
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    token = jnp.arange(num_tokens, dtype=jnp.int32)

    def attend_row(row: Array, out: Array) -> Array:
        kv_len = metadata.kv_lens[row]
        begin, end = metadata.cu_q_lens[row], metadata.cu_q_lens[row + 1]
        position = kv_len - (end - token)  # of each token, were it this row's
        pages = decode(kv[metadata.page_table[group, row]])  # [M, page, K, 2, H]
        keys, values = jnp.moveaxis(pages.reshape(-1, *kv.shape[2:]), 2, 0)  # [S, K, H]

        key = jnp.arange(keys.shape[0], dtype=jnp.int32)
        visible = key[None, :] <= position[:, None]
        if window is not None:
            visible &= key[None, :] > position[:, None] - window
        visible &= ((begin <= token) & (token < end))[:, None]  # [T, S]

        scores = scale * jnp.einsum("TKGH,SKH->TKGS", queries, keys, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(visible[:, None, None, :], scores, MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        # A slot that no query sees may hold NaN, and 0 * NaN is NaN: select values as well.
        values = jnp.where(visible.any(0)[:, None, None], values, 0.0)
        attended = jnp.einsum("TKGS,SKH->TKGH", weights, values, precision="highest")
        has_keys = visible.any(1)[:, None, None, None]
        return jnp.where(has_keys, attended, out)

    out = lax.fori_loop(0, metadata.num_seqs, attend_row, jnp.zeros_like(queries))
    return out.reshape(num_tokens, num_heads, head_dim).astype(q.dtype)
