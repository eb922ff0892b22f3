"""The one place where an activation meets a weight matrix."""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.weights import RowLayout

_WEIGHT_SPECS = {
    "column": PartitionSpec("tensor", None),
    "row": PartitionSpec(None, "tensor"),
    None: PartitionSpec(),
}

_MAX_ROWS_WEIGHT_FIRST = 32


def make_matrix(
    layout: RowLayout,
    in_features: int,
    context: ModelContext,
    sharding: Literal["column", "row"] | None,
) -> nnx.Param:
    """Returns a weight `[O, I]` that knows its checkpoint layout and its split over the mesh."""
    value = jnp.zeros((layout.num_rows, in_features), context.weight_dtype)
    return nnx.Param(value, layout=layout, spec=_WEIGHT_SPECS[sharding])


class Linear(nnx.Module):
    """`y = x Wᵀ + b`: x is rounded to the weight's dtype, sums are float32, y is rounded once.

    Weights are kept `[O, I]` as checkpoints have them. On two cores of a Xeon with AMX, jax 0.10.2,
    bfloat16 weights of `[3072, 576]` that do not fit the cache are read by 8 rows at 14.1 GB/s as
    `x Wᵀ`, 18.7 as `(W xᵀ)ᵀ`, and 9.4 when kept as `[I, O]`; by 256 rows at 2.8, 1.5 and less.

    Args:
      layout: the rows O and the checkpoint tensors that fill them.
      sharding: "column" splits O over the mesh axis "tensor", "row" splits I and sums over it,
        None copies the weight to every device.
      weight: a parameter to share instead of making one (a head tied to the embedding).
    """

    def __init__(
        self,
        in_features: int,
        layout: RowLayout,
        context: ModelContext,
        *,
        sharding: Literal["column", "row"] | None = None,
        bias: bool = False,
        weight: nnx.Param | None = None,
    ) -> None:
        self.context = context
        self.sharding = sharding
        if weight is None:
            weight = make_matrix(layout, in_features, context, sharding)
        self.weight = weight
        self.bias = _make_bias(layout, context, sharding) if bias else None

    def __call__(
        self, x: Float[Array, "T I"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "T O"]:
        """Returns the product in `out_dtype`, by default the activation dtype."""
        y = self._product(x.astype(self.weight.dtype), self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)[None]
        y = y.astype(out_dtype or self.context.dtype)
        return self.context.constrain(y, *((None, "tensor") if self.sharding == "column" else ()))

    def _product(self, x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
        """Returns x Wᵀ in float32."""
        dot = partial(
            jax.lax.dot_general,
            dimension_numbers=(((1,), (1,)), ((), ())),
            precision=self.context.precision,
            preferred_element_type=jnp.float32,
        )
        if self.context.platform != "cpu" or x.shape[0] > _MAX_ROWS_WEIGHT_FIRST:
            return dot(x, weight)
        # XLA:CPU packs the right-hand matrix at every call: let that be the small one. The barrier
        # keeps XLA from turning the product around again.
        return jax.lax.optimization_barrier(dot(weight, x)).T


def _make_bias(layout: RowLayout, context: ModelContext, sharding: str | None) -> nnx.Param:
    spec = PartitionSpec("tensor") if sharding == "column" else PartitionSpec()
    value = jnp.zeros(layout.num_rows, context.weight_dtype)
    return nnx.Param(value, layout=layout, spec=spec)
