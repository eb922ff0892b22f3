"""Zeros that take memory only where they are written, for pools that are hardly ever used whole.

On CPUs `jnp.zeros` writes all of an array: 0.4 s and as much resident memory for each GiB.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kernels import native

__all__ = ["lazy_zeros", "unavailable"]

_TARGET = "jaxinfer_lazy_zeros_v1"


def unavailable() -> str | None:
    """Returns why the library cannot be used, or None."""
    return native.unavailable(_TARGET, has_sets=False)


def lazy_zeros(shape: tuple[int, ...], dtype: DTypeLike, platform: str) -> Array:
    """Returns zeros; on a CPU with the C++ library, whose memory the system gives when written.

    To be called where one device computes: the call is not split over several.
    """
    if platform != "cpu" or unavailable() is not None:
        return jnp.zeros(shape, dtype)
    # Equal calls without a side effect would be merged, and their result copied.
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)
    return call()
