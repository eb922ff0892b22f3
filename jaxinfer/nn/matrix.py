"""What a weight matrix may be: an array, codes that stay quantized, or pieces of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.weights import RowLayout
from jaxinfer.quantization import fit_format
from kernels import quantized_matmul
from kernels.quantized_matmul import QFormat, QTensor
from kernels.quantized_matmul.partition import partition_specs

Split: TypeAlias = Literal["column", "row"] | None
"""How a matrix `[O, I]` is divided over the mesh axis "tensor": its rows O, its columns I, not."""

AXIS = "tensor"

_ARRAY_SPECS = {
    "column": PartitionSpec(AXIS),
    "row": PartitionSpec(None, AXIS),
    None: PartitionSpec(),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedMatrix:
    """A fused matrix whose checkpoint tensors differ in format: q and k in 4 bits, v in 6.

    Each piece holds the slots of neighbouring parts of one format, in every block of the
    parameter's `RowLayout`; their products are interleaved afterwards.

    Attributes:
      pieces: arrays or QTensors `[blocks * slots * slot_rows, I]`, in slot order.
      rows: of each piece, its rows in one block: `slots * slot_rows`.
    """

    pieces: tuple[Any, ...]
    rows: tuple[int, ...] = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (O, I) of the whole."""
        return sum(piece.shape[0] for piece in self.pieces), self.pieces[0].shape[1]


Matrix: TypeAlias = jax.Array | QTensor | MixedMatrix


def make_matrix(
    layout: RowLayout,
    in_features: int,
    context: ModelContext,
    split: Split,
    fmt: QFormat | None = None,
) -> nnx.Param:
    """Returns a weight `[O, I]` that knows its checkpoint layout and its split over the mesh.

    Its value is an array, or a QTensor where a format is given; a loader may put another `Matrix`
    of the same shape in its place.

    Raises:
      ValueError: the format does not fit the matrix.
    """
    shape = (layout.num_rows, in_features)
    if fmt is None:
        value: Matrix = jnp.zeros(shape, context.weight_dtype)
    else:
        devices = context.tensor_parallel if split == "row" else 1
        fmt = fit_format(fmt, in_features, devices, context.platform)
        codes = quantized_matmul.quantize(jnp.zeros(shape, jnp.float32), fmt)
        value = quantized_matmul.prepare(codes, context.platform)
    return nnx.Param(value, layout=layout, split=effective_split(split, context), fmt=fmt)


def effective_split(split: Split, context: ModelContext) -> Split:
    """Returns the split, which is none on one device: there columns may be in act-order, too."""
    return split if context.tensor_parallel > 1 else None


def specs_of(value: Any, split: Split) -> Any:
    """Returns a weight with each of its arrays replaced by its PartitionSpec; also of a vector.

    Raises:
      ValueError: a row split of columns that are permuted.
    """
    if isinstance(value, QTensor):
        return partition_specs(value, split, AXIS)
    if isinstance(value, MixedMatrix):
        return MixedMatrix(tuple(specs_of(piece, split) for piece in value.pieces), value.rows)
    return _ARRAY_SPECS[split]
