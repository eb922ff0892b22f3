"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxinfer.nn.weights import plain_layout


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + eps) · w` over the last axis, in float32, rounded once to x's dtype.

    The weight is float32 whatever the model's weight dtype: it is small, and families that store
    `w - 1` get their 1 added at load without a rounding.
    """

    def __init__(self, features: int, eps: float) -> None:
        self.eps = eps
        self.weight = nnx.Param(
            jnp.ones(features, jnp.float32), layout=plain_layout(features), split=None
        )

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Returns x normalised, in its own dtype."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        return (wide * jax.lax.rsqrt(variance + self.eps) * weight).astype(x.dtype)
