"""Statistics of logits on CPUs by C++ loops behind `jax.ffi`, built by `kernels.native_build`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from kernels import native

__all__ = ["is_available", "logit_stats", "supports", "unavailable"]

# The version is that of the handlers in cpu.cc.
_TARGET = "jaxinfer_logit_stats_v1"


def is_available() -> bool:
    """Whether the library is there and this version of jax takes it."""
    return unavailable() is None


def unavailable() -> str | None:
    """Returns why the library cannot be used, or None."""
    return native.unavailable(_TARGET)


def supports(logits: Array | jax.ShapeDtypeStruct) -> None:
    """Refuses without the library, and an empty vocabulary."""
    if reason := unavailable():
        raise NotImplementedError(reason)
    if logits.dtype != jnp.float32 or logits.shape[1] == 0:
        raise NotImplementedError(f"logits are {logits.dtype}{logits.shape}: needs float32 [B, V]")


def logit_stats(
    logits: Float32[Array, "B V"],
) -> tuple[Int32[Array, " B"], Float32[Array, " B"]]:
    """A row's bits depend on no other row; see `kernels.logit_stats`."""
    rows = logits.shape[0]
    results = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    best, log_total = jax.ffi.ffi_call(native.handler(_TARGET), results)(logits)
    return best, log_total
