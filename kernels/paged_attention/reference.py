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
    decode,
    encode_rows,
    held_by,
    holding,
    kv_dims,
    quantize_kv,
    read_pages,
    values_of,
)
from kernels.paged_attention.metadata import AttentionMetadata
from kernels.paged_attention.tpu_layout import WordsKV

MASKED = -1e30  # finite: a row of -inf would make softmax NaN


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses caches whose elements alone do not say which values they stand for."""
    del q  # of any floating point dtype
    if isinstance(kv, QuantizedKV):
        return
    if isinstance(kv, WordsKV):
        if kv.words.dtype == jnp.int32:
            raise NotImplementedError("a cache of int8 needs scales: pass a QuantizedKV")
        return
    if not jnp.issubdtype(kv.dtype, jnp.floating) and kv.dtype != jnp.uint16:
        raise NotImplementedError(f"a cache of {kv.dtype} needs scales: pass a QuantizedKV")


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Writes into the cache as one list of slots; see `kernels.paged_attention.write`."""
    values, rows = values_of(kv), new_kv
    page_size = kv_dims(kv).page_size
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if isinstance(kv, QuantizedKV):
        rows, new_scales = quantize_kv(new_kv)
        scales = kv.scales.at[page, :, :, offset].set(new_scales)
    held = held_by(values).at[page, offset].set(encode_rows(rows, values))
    values = holding(held, values)
    return QuantizedKV(values, scales) if isinstance(kv, QuantizedKV) else values


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
    rows = decode(read_pages(values_of(kv), pages))
    if isinstance(kv, QuantizedKV):
        scales = kv.scales[pages][..., : kv_dims(kv).page_size]
        rows = rows * jnp.moveaxis(scales, 3, 1)[..., None]  # [M, page, K, 2]
    return rows.reshape(-1, *rows.shape[2:])
