"""Token ids to hidden states."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.matrix import make_matrix
from jaxinfer.nn.weights import RowLayout
from kernels.quantized_matmul import QFormat, QTensor
from kernels.quantized_matmul.format import take_rows


class Embedding(nnx.Module):
    """A table `[V, D]` of token vectors, its rows split over the mesh axis "tensor".

    Args:
      fmt: quantizes the table when it is filled; of a quantized one only the rows asked for are
        ever dequantized.
    """

    def __init__(
        self,
        features: int,
        layout: RowLayout,
        context: ModelContext,
        fmt: QFormat | None = None,
    ) -> None:
        self.context = context
        self.weight = make_matrix(layout, features, context, "column", fmt)

    def __call__(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Returns each token's vector in the activation dtype."""
        table = self.weight.get_value()
        if isinstance(table, QTensor):
            rows = take_rows(table, token_ids, self.context.dtype)
        else:
            rows = jnp.take(table, token_ids, axis=0, mode="clip")
        return self.context.constrain(rows.astype(self.context.dtype))
