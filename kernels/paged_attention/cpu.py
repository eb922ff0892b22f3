"""Paged attention on CPUs by C++ loops behind `jax.ffi`: one call a layer to write, one to attend.

The sources beside this file are built by `kernels.native_build` into the library of all C++
kernels. Without it, or on heads that are not a multiple of 8, this refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from kernels import native
from kernels.paged_attention.cache import KVCache, KVStruct, QuantizedKV, kv_dims, values_of
from kernels.paged_attention.metadata import AttentionMetadata
from kernels.paged_attention.tpu_layout import WordsKV

__all__ = ["attend", "is_available", "supports", "unavailable", "write"]

# The versions are those of the handlers in cpu.cc.
_ATTEND, _WRITE = "jaxinfer_attend_v2", "jaxinfer_write_kv_v1"


def is_available() -> bool:
    """Whether the library is there and this version of jax takes it."""
    return unavailable() is None


def unavailable() -> str | None:
    """Returns why the library cannot be used, or None."""
    return native.unavailable(_ATTEND, _WRITE)


def supports(q: Array | jax.ShapeDtypeStruct, kv: KVCache | KVStruct) -> None:
    """Refuses without the library, and caches of other layouts, dtypes and head sizes."""
    if reason := unavailable():
        raise NotImplementedError(reason)
    if not jnp.issubdtype(q.dtype, jnp.floating) or jnp.dtype(q.dtype).itemsize > 4:
        raise NotImplementedError(f"q is {q.dtype}: needs float32 or less")
    values = values_of(kv)
    if isinstance(values, WordsKV):
        raise NotImplementedError("the cache is laid out for a TPU")
    is_quantized = isinstance(kv, QuantizedKV)
    dtypes = (jnp.int8,) if is_quantized else (jnp.float32, jnp.float16, jnp.uint16)
    if values.dtype not in dtypes:
        raise NotImplementedError(
            f"the cache is {values.dtype}: needs float32, float16, bfloat16 held as uint16, or "
            f"int8 with scales"
        )
    dims = kv_dims(kv)
    if dims.head_dim % 8:
        raise NotImplementedError(f"heads of {dims.head_dim}: needs a multiple of 8")
    if isinstance(kv, QuantizedKV) and kv.scales.shape[-1] != dims.page_size:
        raise NotImplementedError(f"scales {kv.scales.shape} are laid out for a TPU")


def write(kv: KVCache, new_kv: Float[Array, "T K 2 H"], slot_mapping: Int[Array, "T"]) -> KVCache:
    """Writes in place where the cache is donated; see `kernels.paged_attention.write`."""
    rows, slots = new_kv.astype(jnp.float32), slot_mapping.astype(jnp.int32)
    if isinstance(kv, QuantizedKV):
        results = (jax.typeof(kv.values), jax.typeof(kv.scales))
        call = _call(_WRITE, results, input_output_aliases={0: 0, 3: 1})
        return QuantizedKV(*call(kv.values, rows, slots, kv.scales))
    call = _call(_WRITE, jax.typeof(kv), input_output_aliases={0: 0})
    return call(kv, rows, slots)


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
    """Attends; a query's bits depend only on its own keys; see `kernels...attend`.

    In float32, but for a bfloat16 cache and many queries where the CPU has AMX.
    """
    queries = q.astype(jnp.float32)
    scales = (kv.scales,) if isinstance(kv, QuantizedKV) else ()
    attended = _call(_ATTEND, jax.typeof(queries))(
        queries,
        values_of(kv),
        metadata.page_table,
        metadata.kv_lens,
        metadata.cu_q_lens,
        metadata.num_seqs,
        *scales,
        group=np.int64(group),
        window=np.int64(window or 0),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        is_decode=np.bool_(metadata.is_decode),
    )
    return attended.astype(q.dtype)


def _call(target: str, results: Any, **options: Any) -> Callable[..., Any]:
    return jax.ffi.ffi_call(native.handler(target), results, **options)
