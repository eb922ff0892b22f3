"""Token ids to hidden states."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.linear import make_matrix
from jaxinfer.nn.weights import RowLayout


class Embedding(nnx.Module):
    """A table `[V, D]` of token vectors, its rows split over the mesh axis "tensor"."""

    def __init__(self, features: int, layout: RowLayout, context: ModelContext) -> None:
        self.context = context
        self.weight = make_matrix(layout, features, context, "column")

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Returns each token's vector in the activation dtype."""
        rows = jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        return self.context.constrain(rows.astype(self.context.dtype))
