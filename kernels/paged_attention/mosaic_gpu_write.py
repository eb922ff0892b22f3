"""Mosaic GPU copy of a step's new keys and values into the slots of a cache, in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import device
from kernels.paged_attention.mosaic_gpu_pages import Ref, compiler_params

_BUFFER_BYTES = 32 * 1024  # of a thread block: several fit an SM


def copy_rows(held: Array, rows: Array, slots: Array) -> Array:
    """Returns `held` `[P, page, K, 2, H]` with `rows` `[T, K, 2, H]` in its slots `[T]`.

    In place where `held` is donated: the kernel writes through a reference to it.
    """
    num_tokens, (num_kv_heads, _, head_dim) = rows.shape[0], rows.shape[1:]
    row = (2 * num_kv_heads, head_dim)
    row_bytes = 2 * num_kv_heads * head_dim * rows.dtype.itemsize
    size = max(1, min(16, num_tokens, _BUFFER_BYTES // row_bytes))
    cache: Any = jax.new_ref(held.reshape(-1, *row))

    def body(cache: Ref, rows: Ref, slots: Ref) -> None:
        pl.run_scoped(
            partial(_copy_some, cache, rows, slots),
            plgpu.SMEM((size, *row), held.dtype),
            plgpu.Barrier(),
            collective_axes="warpgroup",
        )

    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(-(-num_tokens // size),),
            grid_names=("block",),
            num_threads=1,
            thread_name="warpgroup",
        ),
        interpret=device.interpret_mode(),
        compiler_params=compiler_params(),
        name="paged_attention_write",
    )(cache, rows.reshape(-1, *row), slots)
    return jax.freeze(cache).reshape(held.shape)


def _copy_some(cache: Ref, rows: Ref, slots: Ref, buffer: Ref, here: Ref) -> None:
    """Copies a thread block's tokens, as many as the buffer holds."""
    size, num_tokens = buffer.shape[0], rows.shape[0]
    begin = lax.axis_index("block") * size
    plgpu.copy_gmem_to_smem(rows.at[pl.ds(begin, size)], buffer, here)
    plgpu.barrier_wait(here)

    @pl.loop(0, jnp.minimum(num_tokens - begin, size))
    def _copy(i: Array) -> None:
        plgpu.copy_smem_to_gmem(buffer.at[i], cache.at[slots[begin + i]])

    plgpu.wait_smem_to_gmem(0)
