"""The one place where an activation meets a weight matrix."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.weights import RowLayout
from jaxinfer.quantization import fit_format
from kernels import quantized_matmul
from kernels.quantized_matmul import QFormat, QTensor
from kernels.quantized_matmul.format import local_part, partition_specs

_WEIGHT_SPECS = {
    "column": PartitionSpec("tensor", None),
    "row": PartitionSpec(None, "tensor"),
    None: PartitionSpec(),
}

_MAX_ROWS_WEIGHT_FIRST = 32


Sharding: TypeAlias = Literal["column", "row"] | None


def make_matrix(
    layout: RowLayout,
    in_features: int,
    context: ModelContext,
    sharding: Sharding,
    fmt: QFormat | None = None,
) -> nnx.Param:
    """Returns a weight `[O, I]` that knows its checkpoint layout and its split over the mesh.

    Its value is an array, or a QTensor where a format is given.

    Raises:
      ValueError: the format does not fit the matrix.
    """
    shape = (layout.num_rows, in_features)
    if fmt is None:
        value = jnp.zeros(shape, context.weight_dtype)
        return nnx.Param(value, layout=layout, spec=_WEIGHT_SPECS[sharding])
    devices = context.tensor_parallel if sharding == "row" else 1
    fmt = fit_format(fmt, in_features, devices, context.platform)
    codes = quantized_matmul.quantize(jnp.zeros(shape, jnp.float32), fmt)
    codes = quantized_matmul.prepare(codes, context.platform)
    spec = partition_specs(codes, sharding, "tensor")
    return nnx.Param(codes, layout=layout, spec=spec, fmt=fmt)


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
      fmt: keeps the weight quantized; `kernels.quantized_matmul` then multiplies, x unrounded.
    """

    def __init__(
        self,
        in_features: int,
        layout: RowLayout,
        context: ModelContext,
        *,
        sharding: Sharding = None,
        bias: bool = False,
        weight: nnx.Param | None = None,
        fmt: QFormat | None = None,
    ) -> None:
        self.context = context
        self.sharding = sharding
        if weight is None:
            weight = make_matrix(layout, in_features, context, sharding, fmt)
        self.weight = weight
        self.bias = _make_bias(layout, context, sharding) if bias else None

    def __call__(
        self, x: Float[Array, "T I"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "T O"]:
        """Returns the product in `out_dtype`, by default the activation dtype."""
        weight = self.weight.get_value()
        if isinstance(weight, QTensor):
            is_done = self.bias is None and not self._is_summed
            rounded = (out_dtype or self.context.dtype) if is_done else jnp.float32
            y = self._quantized_product(x.astype(self.context.dtype), weight, rounded)
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

    def _quantized_product(
        self, x: Float[Array, "T I"], weight: QTensor, out_dtype: DTypeLike
    ) -> Float[Array, "T O"]:
        """Returns x Wᵀ: kernels see each device's own part, whole groups of it."""

        def multiply(x: jax.Array, weight: QTensor) -> jax.Array:
            y = quantized_matmul.matmul(
                x,
                local_part(weight),
                platform=self.context.platform,
                implementation=self.context.matmul,
                out_dtype=out_dtype,
            )
            return jax.lax.psum(y, "tensor") if self._is_summed else y

        by_columns = PartitionSpec(None, "tensor")
        run = jax.shard_map(
            multiply,
            mesh=self.context.mesh,
            in_specs=(
                by_columns if self.sharding == "row" else PartitionSpec(),
                partition_specs(weight, self.sharding, "tensor"),
            ),
            out_specs=by_columns if self.sharding == "column" else PartitionSpec(),
            check_vma=False,  # kernels need not annotate what varies over the mesh
        )
        return run(x, weight)


def _make_bias(layout: RowLayout, context: ModelContext, sharding: str | None) -> nnx.Param:
    spec = PartitionSpec("tensor") if sharding == "column" else PartitionSpec()
    value = jnp.zeros(layout.num_rows, context.weight_dtype)
    return nnx.Param(value, layout=layout, spec=spec)
