"""How the arrays of a quantized weight are split over devices."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax.sharding import PartitionSpec

from kernels.quantized_matmul.format import QTensor


def partition_specs(
    w: QTensor, split: Literal["column", "row"] | None, axis: str | None
) -> QTensor:
    """Returns w with each array replaced by its PartitionSpec.

    Args:
      w: a weight; `jax.ShapeDtypeStruct` leaves are enough.
      split: "column" divides O over the mesh axis, "row" divides I, None copies everything.
      axis: the mesh axis.

    Raises:
      ValueError: `row` with permuted columns, whose order belongs to the whole row.
    """
    if split == "row" and w.perm is not None:
        raise ValueError("a weight with permuted columns cannot be split along I")
    rows = axis if split == "column" else None
    columns = axis if split == "row" else None
    groups = columns if w.group_size != w.shape[1] else None
    group_spec = (
        PartitionSpec(groups, rows) if w.layout.groups_first else PartitionSpec(rows, groups)
    )
    return dataclasses.replace(
        w,
        qvalue=PartitionSpec(rows, columns),
        scale=group_spec,
        offset=None if w.offset is None else group_spec,
        codebook=None if w.codebook is None else PartitionSpec(),
        perm=None if w.perm is None else PartitionSpec(),
    )


def local_part(w: QTensor) -> QTensor:
    """Returns a device's part of a split weight as a QTensor of its own (inside `shard_map`)."""
    return dataclasses.replace(w, group_size=min(w.group_size, w.shape[1]))
