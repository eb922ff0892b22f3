"""The one place where an activation meets a weight matrix."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.matrix import (
    AXIS,
    Matrix,
    MixedMatrix,
    Split,
    effective_split,
    make_matrix,
    specs_of,
)
from jaxinfer.nn.weights import RowLayout
from kernels import quantized_matmul
from kernels.quantized_matmul import QFormat, QTensor
from kernels.quantized_matmul.partition import local_part

_MAX_ROWS_WEIGHT_FIRST = 32


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
      fmt: quantizes the weight when it is filled; quantized weights, also those of a checkpoint,
        are multiplied by `kernels.quantized_matmul`, x rounded to the dtype of other weights.
    """

    def __init__(
        self,
        in_features: int,
        layout: RowLayout,
        context: ModelContext,
        *,
        sharding: Split = None,
        bias: bool = False,
        weight: nnx.Param | None = None,
        fmt: QFormat | None = None,
    ) -> None:
        self.context = context
        self.sharding = effective_split(sharding, context)
        if weight is None:
            weight = make_matrix(layout, in_features, context, sharding, fmt)
        self.weight = weight
        self.bias = _make_bias(layout, context, sharding) if bias else None

    def __call__(
        self,
        x: Float[Array, "T I"],
        out_dtype: DTypeLike | None = None,
        num_tokens: Int32[Array, ""] | None = None,
    ) -> Float[Array, "T O"]:
        """Returns the product in `out_dtype`, by default the activation dtype.

        Only the first `num_tokens` rows are meant, where given: others are unspecified.
        """
        weight = self.weight.get_value()
        if isinstance(weight, QTensor | MixedMatrix):
            is_done = self.bias is None and not self._is_summed
            rounded = (out_dtype or self.context.dtype) if is_done else jnp.float32
            y = self._product_by_device(
                x.astype(self.context.weight_dtype), weight, rounded, num_tokens
            )
        else:
            y = self._product(x.astype(weight.dtype), weight)
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

    @property
    def _is_summed(self) -> bool:
        """Whether a result is the sum of several devices' products."""
        return self.sharding == "row" and self.context.tensor_parallel > 1

    def _product_by_device(
        self,
        x: Float[Array, "T I"],
        weight: QTensor | MixedMatrix,
        out_dtype: DTypeLike,
        num_tokens: Int32[Array, ""] | None,
    ) -> Float[Array, "T O"]:
        """Returns x Wᵀ: kernels see each device's own part, whole groups of it."""

        def multiply(
            x: jax.Array, weight: QTensor | MixedMatrix, num_tokens: jax.Array | None
        ) -> jax.Array:
            y = self._local_product(x, weight, out_dtype, num_tokens)
            return jax.lax.psum(y, AXIS) if self._is_summed else y

        by_columns = PartitionSpec(None, AXIS)
        run = jax.shard_map(
            multiply,
            mesh=self.context.mesh,
            in_specs=(
                by_columns if self.sharding == "row" else PartitionSpec(),
                specs_of(weight, self.sharding),
                PartitionSpec(),
            ),
            out_specs=by_columns if self.sharding == "column" else PartitionSpec(),
            check_vma=False,  # kernels need not annotate what varies over the mesh
        )
        return run(x, weight, num_tokens)

    def _local_product(
        self,
        x: Float[Array, "T I"],
        weight: Matrix,
        out_dtype: DTypeLike,
        num_tokens: Int32[Array, ""] | None,
    ) -> Float[Array, "T O"]:
        """Returns x Wᵀ of one device's part; the products of pieces are put block by block."""
        if isinstance(weight, MixedMatrix):
            products = [
                self._local_product(x, piece, out_dtype, num_tokens).reshape(len(x), -1, rows)
                for piece, rows in zip(weight.pieces, weight.rows, strict=True)
            ]
            return jnp.concatenate(products, axis=2).reshape(len(x), -1)
        if not isinstance(weight, QTensor):
            return self._product(x.astype(weight.dtype), weight).astype(out_dtype)
        return quantized_matmul.matmul(
            x,
            local_part(weight),
            platform=self.context.platform,
            implementation=self.context.matmul,
            out_dtype=out_dtype,
            num_tokens=num_tokens,
        )


def _make_bias(layout: RowLayout, context: ModelContext, sharding: Split) -> nnx.Param:
    value = jnp.zeros(layout.num_rows, context.weight_dtype)
    return nnx.Param(value, layout=layout, split="column" if sharding == "column" else None)
