"""The sampler on CPUs, by C++ loops behind `jax.ffi`, built by `kernels.native_build`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from kernels import native
from kernels.token_sampler.rows import SamplerRows, TokenMasks

__all__ = ["choose_tokens", "is_available", "supports", "unavailable"]

# The version is that of the handlers in cpu.cc.
_TARGET = "jaxinfer_token_sampler_v1"


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


def choose_tokens(
    logits: Float32[Array, "B V"],
    best: Int32[Array, " B"],
    rows: SamplerRows,
    row_ids: Int32[Array, " B"],
    length: Int32[Array, " B"],
    masks: TokenMasks | None = None,
    *,
    platform: str,
) -> Int32[Array, " B"]:
    """A row's token depends on no other row; see `kernels.token_sampler`."""
    if masks is None:
        nothing = jnp.zeros((1, 1), jnp.uint32)
        masks = TokenMasks(nothing, jnp.zeros_like(row_ids), jnp.bool_(False))
    result = jax.ShapeDtypeStruct(best.shape, jnp.int32)
    return jax.ffi.ffi_call(native.handler(_TARGET), result)(
        *(logits, best, rows.reals, rows.integers, rows.stop_ids),
        *(rows.bias_ids, rows.bias_values, rows.counts, row_ids, length),
        *(masks.words, masks.rows, masks.are_given),
    )
