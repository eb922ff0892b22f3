"""How tensors of a checkpoint fill a parameter: fused, repeated, padded rows. Host numpy only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Weight:
    """The checkpoint tensors of one parameter, an entry of a family's `WEIGHT_MAP`.

    Attributes:
      names: names in the checkpoint, in the order of the layout's parts; `{i}` is the layer.
      offset: added in float32 before the parameter's own rounding.
    """

    names: tuple[str, ...]
    offset: float = 0.0


@dataclass(frozen=True)
class Part:
    """The share of one checkpoint tensor in a fused parameter.

    Attributes:
      rows: rows of the checkpoint's tensor.
      slots: consecutive slots it fills in each block.
      repeat: consecutive blocks that hold the same rows (KV heads copied for tensor parallelism).
    """

    rows: int
    slots: int = 1
    repeat: int = 1


@dataclass(frozen=True)
class RowLayout:
    """Rows of a parameter, seen as [blocks, slots, slot_rows], each part owning some of the slots.

    Splitting the rows evenly over devices splits the blocks, so every device gets whole blocks with
    their share of each part. What no tensor fills is zero.

    Attributes:
      blocks, slot_rows: the view above; the parts say how many slots there are.
      parts: the checkpoint tensors, in slot order.
      columns: columns of the checkpoint's tensors where the parameter has more, else None.
    """

    blocks: int
    slot_rows: int
    parts: tuple[Part, ...]
    columns: int | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the parameter, padding included."""
        return self.blocks * self.slot_rows * sum(part.slots for part in self.parts)

    def part_shape(self, part_idx: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape the checkpoint's tensor must have for a parameter of this shape."""
        rows = self.parts[part_idx].rows
        return (rows,) if len(shape) == 1 else (rows, self.columns or shape[1])

    def run(self, first: int, stop: int) -> RowLayout:
        """Returns the layout of a parameter that holds only the parts `first` to `stop - 1`."""
        return replace(self, parts=self.parts[first:stop])

    def place(self, buffer: np.ndarray, part_idx: int, tensor: np.ndarray) -> None:
        """Writes one checkpoint tensor into its slots of the parameter's host buffer.

        Columns beyond the tensor's stay as they are. Of a quantized tensor each array is placed by
        itself: all have the same rows.
        """
        part = self.parts[part_idx]
        first = sum(before.slots for before in self.parts[:part_idx])
        view = buffer.reshape(self.blocks, -1, self.slot_rows, *buffer.shape[1:])
        slots = view[:, first : first + part.slots]
        blocks = self.blocks // part.repeat
        missing = blocks * part.slots * self.slot_rows - part.rows
        if missing:
            tensor = np.pad(tensor, [(0, missing)] + [(0, 0)] * (tensor.ndim - 1))
        tensor = tensor.reshape(blocks, part.slots, self.slot_rows, *tensor.shape[1:])
        if tensor.ndim == 4:
            slots = slots[..., : tensor.shape[-1]]
        for copy in range(part.repeat):
            slots[copy :: part.repeat] = tensor


def plain_layout(rows: int, multiple_of: int = 1, columns: int | None = None) -> RowLayout:
    """Returns the layout of one tensor, its rows padded to a multiple."""
    return RowLayout(1, round_up(rows, multiple_of), (Part(rows),), columns)


def round_up(value: int, multiple_of: int) -> int:
    """Returns the smallest multiple that is not below the value."""
    return -(-value // multiple_of) * multiple_of
