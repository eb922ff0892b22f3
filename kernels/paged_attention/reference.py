"""Paged attention as its formula reads, in float32: the contract for every other implementation.

Never tuned: it gathers whole page tables and scores every token against every row's keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int, Int32

from kernels.paged_attention.cache import (
    KVCache,
    KVStruct,
    QuantizedKV,
    as_rows,
    decode,
    encode_rows,
    kv_dims,
    quantize_kv,
)
from kernels.paged_attention.metadata import AttentionMetadata

MASKED = -1e30  # finite: a row of -inf would make softmax NaN


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses caches whose elements alone do not say which values they stand for."""
    del q  # of any floating point dtype
    if isinstance(kv, QuantizedKV):
        return
    if not jnp.issubdtype(kv.dtype, jnp.floating) and kv.dtype != jnp.uint16:
        raise NotImplementedError(f"a cache of {kv.dtype} needs scales: pass a QuantizedKV")


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Writes into the cache as one list of slots; see `kernels.paged_attention.write`."""

    def place(held: Array, rows: Array) -> Array:  # [P, page, ...], [T, ...]
        slots = held.reshape(-1, *held.shape[2:])
        return slots.at[slot_mapping].set(rows).reshape(held.shape)

    if isinstance(kv, QuantizedKV):
        codes, new_scales = quantize_kv(new_kv)
        values = place(kv.values, encode_rows(codes, kv.values))
        scales = place(jnp.moveaxis(kv.scales, 3, 1), new_scales)
        return QuantizedKV(values, jnp.moveaxis(scales, 1, 3))
    return place(kv, encode_rows(new_kv, kv))


def attend(
    q: Float[Array, "T N H"],
    kv: KVCache,
    metadata: AttentionMetadata,
    *,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Attends row by row; see `kernels.paged_attention.attend`."""
    num_tokens, num_heads, head_dim = q.shape
    queries = q.astype(jnp.float32).reshape(num_tokens, kv_dims(kv).num_kv_heads, -1, head_dim)
    token = jnp.arange(num_tokens, dtype=jnp.int32)

    def attend_row(row: Array, out: Array) -> Array:
        kv_len = metadata.kv_lens[row]
        begin, end = metadata.cu_q_lens[row], metadata.cu_q_lens[row + 1]
        position = kv_len - (end - token)  # of each token, were it this row's
        cached = _read(kv, metadata.page_table[group, row])
        keys, values = cached[:, :, 0], cached[:, :, 1]  # [S, K, H]

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


def _read(kv: KVCache, pages: Int32[Array, "M"]) -> Float32[Array, "S K 2 H"]:
    """Returns the keys and values of some pages."""
    if isinstance(kv, QuantizedKV):
        scales = jnp.moveaxis(kv.scales[pages], 3, 1)  # [M, page, K, 2]
        rows = decode(as_rows(kv.values[pages])) * scales[..., None]
    else:
        rows = decode(as_rows(kv[pages]))
    return rows.reshape(-1, *rows.shape[2:])
