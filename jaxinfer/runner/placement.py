"""From the host tensors of one parameter to its value on the devices: assembled, then placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.matrix import MixedMatrix, specs_of
from jaxinfer.nn.weights import RowLayout
from jaxinfer.quantization import quantize_on_host
from jaxinfer.quantized_array import NIBBLE_CHUNK, QuantizedArray, aligned_empty
from kernels.quantized_matmul import LAYOUTS, QFormat, QTensor, cpu, prepare, quantize

_WEIGHTS_AT_ONCE = 1 << 18  # laid out, so that they stay in a core's cache

HostTensor: TypeAlias = np.ndarray | QuantizedArray


class PendingParameter:
    """A parameter while its checkpoint tensors arrive, in any order.

    Float tensors are copied to where they belong at once; quantized ones wait for the others,
    because neighbours of one format become one matrix.
    """

    def __init__(self, param: nnx.Param, context: ModelContext) -> None:
        self.param = param
        self._context = context
        self._layout: RowLayout = param.layout
        self._floats: np.ndarray | None = None
        self._quantized: dict[int, QuantizedArray] = {}
        self._placed: set[int] = set()

    def place(self, part_idx: int, tensor: HostTensor) -> None:
        """Takes one part, rounding a float one to the parameter's dtype."""
        self._placed.add(part_idx)
        if isinstance(tensor, QuantizedArray):
            if self._context.keeps_quantized and self.param.get_metadata().get("fmt") is None:
                self._quantized[part_idx] = tensor
                return
            tensor = tensor.dequantize()
        if self._floats is None:
            dtype = _float_dtype(self.param, self._context)
            self._floats = aligned_empty(shape_of(self.param), dtype, np.zeros)
        self._layout.place(self._floats, part_idx, tensor)

    @property
    def is_complete(self) -> bool:
        """Whether every part has come."""
        return len(self._placed) == len(self._layout.parts)

    def finish(self) -> None:
        """Gives the parameter its value.

        Raises:
          ValueError: quantized columns cannot be padded or split as the mesh asks.
        """
        put_weight(self.param, self._assemble(), self._context)

    def _assemble(self) -> Any:
        """Returns the array, the QTensor or the MixedMatrix that the parts make."""
        if not self._quantized:
            return self._floats
        parts = [self._quantized.get(i) for i in range(len(self._layout.parts))]
        return _matrix_of(parts, self._layout, self._piece)

    def _piece(self, first: int, stop: int) -> Any:
        """Returns one matrix of the parts `first` to `stop - 1`, which have one format."""
        layout = self._layout.run(first, stop)
        columns = shape_of(self.param)[1]
        if first not in self._quantized:
            assert self._floats is not None
            slots = [sum(part.slots for part in self._layout.parts[:i]) for i in (first, stop)]
            view = self._floats.reshape(layout.blocks, -1, layout.slot_rows, columns)
            return view[:, slots[0] : slots[1]].reshape(-1, columns)
        parts = [self._quantized.pop(i) for i in range(first, stop)]
        return _join(parts, layout, columns, partial(_placed, parts, layout))


def put_weight(param: nnx.Param, value: Any, context: ModelContext) -> None:
    """Moves a finished host value to the devices that share it, quantized if the parameter says.

    Raises:
      ValueError: the columns of a quantized matrix cannot be split as the mesh asks.
    """
    fmt = param.get_metadata().get("fmt")
    if fmt is not None:
        # On a CPU in blocks: the whole of a large vocabulary would need gigabytes of temporaries.
        on_host = context.platform == "cpu"
        value = quantize_on_host(value, fmt) if on_host else _quantize(value, fmt, context.platform)
    elif isinstance(value, QTensor | MixedMatrix):
        _check_split(value, param.split, context.tensor_parallel)
        value = _prepared(value, context.platform)
    if context.platform == "cpu" and context.mesh.size == 1:
        value = _in_best_layout(value)
    param.set_value(jax.device_put(value, _shardings(value, param.split, context)))


def expected_value(
    param: nnx.Param, parts: Sequence[QuantizedArray | None], context: ModelContext
) -> Any:
    """Returns what a parameter will hold once it is filled: its arrays as ShapeDtypeStructs.

    Args:
      parts: what quantized ones of its checkpoint tensors will be, abstract; None for floats.

    Raises:
      ValueError: as `put_weight`, and where padding would have to cut a group.
    """
    layout, value = param.layout, param.get_value()
    is_kept = context.keeps_quantized and param.get_metadata().get("fmt") is None
    if is_kept and any(part is not None for part in parts):
        columns = shape_of(param)[1]

        def piece(first: int, stop: int) -> Any:
            run = layout.run(first, stop)
            of_run = [part for part in parts[first:stop] if part is not None]
            if not of_run:
                shape = (run.num_rows, columns)
                return jax.ShapeDtypeStruct(shape, _float_dtype(param, context))
            return _join(
                of_run,
                run,
                columns,
                lambda leaf, shape: jax.ShapeDtypeStruct(shape, leaf(of_run[0]).dtype),
            )

        value = _matrix_of(parts, layout, piece)
        _check_split(value, param.split, context.tensor_parallel)
        value = jax.eval_shape(partial(_prepared, platform=context.platform), value)
    if context.platform == "cpu" and context.mesh.size == 1:
        value = _layout_alone.eval_shape(value)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        value,
        _shardings(value, param.split, context),
    )


def shardings_of(param: nnx.Param, context: ModelContext) -> Any:
    """Returns how a parameter is split: a sharding, or of a quantized one a pytree of them."""
    return _shardings(param.get_value(), param.split, context)


def shape_of(param: nnx.Param) -> tuple[int, ...]:
    """Returns the shape of a parameter as a checkpoint would see it: quantized or not."""
    return param.get_value().shape


def _shardings(value: Any, split: Any, context: ModelContext) -> Any:
    return jax.tree.map(lambda spec: context.sharding(*spec), specs_of(value, split))


@partial(jax.jit, static_argnums=(1, 2))
def _quantize(array: jax.Array, fmt: QFormat, platform: str) -> QTensor:
    """Rounds a matrix to its format, laid out for the platform; in one program, for memory."""
    return prepare(quantize(array, fmt), platform)


def _prepared(value: Any, platform: str) -> Any:
    """Lays codes out for the platform: on CPU readers have done so already."""
    if isinstance(value, MixedMatrix):
        return dataclasses.replace(
            value, pieces=tuple(_prepared(piece, platform) for piece in value.pieces)
        )
    if not isinstance(value, QTensor) or platform == "cpu":
        return value
    return _prepare(value, platform)


def _in_best_layout(value: Any) -> Any:
    """Lays a host value's codes out for this CPU; a device's part of one would not be a weight.

    A few rows at a time, in place where they may be written and codes keep their size: a vocabulary
    is not held twice.
    """
    if isinstance(value, MixedMatrix):
        return dataclasses.replace(value, pieces=tuple(map(_in_best_layout, value.pieces)))
    if not isinstance(value, QTensor):
        return value
    layout = cpu.best_layout(value)
    if layout == value.layout or not isinstance(value.qvalue, np.ndarray):
        return prepare(value, layout)
    found = {"qvalue": value.qvalue, "scale": value.scale, "offset": value.offset}
    arrays = {name: array for name, array in found.items() if array is not None}
    num_rows, columns = value.shape
    made: dict[str, Any] = {}
    for name, array in arrays.items():
        is_packed = layout.five_bits and name == "qvalue"
        packed = (num_rows, columns * 5 // 8)
        made[name] = aligned_empty(packed, np.dtype(np.uint8)) if is_packed else _own(array)
    step = max(_WEIGHTS_AT_ONCE // columns // layout.row_block, 1) * layout.row_block
    for first in range(0, num_rows, step):
        rows: dict[str, Any] = {name: arrays[name][first : first + step] for name in made}
        part = prepare(dataclasses.replace(value, **rows), layout)
        for name, array in made.items():
            array[first : first + step] = getattr(part, name)
    return dataclasses.replace(value, **made, layout=layout)


# Made once: `jax.eval_shape` makes one at each call, and jax keeps what it has traced of each as
# long as the function lives.
_layout_alone = jax.jit(_in_best_layout)


def _own(array: np.ndarray) -> np.ndarray:
    """Returns an array that may be written and that XLA adopts, a copy where it must."""
    if array.flags.writeable and not array.ctypes.data % 64:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    copy[:] = array
    return copy


_prepare: Callable[[QTensor, str], QTensor] = jax.jit(prepare, static_argnums=1)


def _float_dtype(param: nnx.Param, context: ModelContext) -> np.dtype:
    """Returns what float tensors become on the host: float32 where they will be quantized."""
    if param.get_metadata().get("fmt") is not None:
        return np.dtype(np.float32)
    is_plain = not isinstance(param.get_value(), QTensor | MixedMatrix)
    return np.dtype(param.dtype) if is_plain else context.weight_dtype


def _matrix_of(
    parts: Sequence[QuantizedArray | None], layout: RowLayout, piece: Callable[[int, int], Any]
) -> Any:
    """Returns one matrix where all parts have one format, else one for each run of such.

    Args:
      parts: None for a float one.
      piece: makes the matrix of the parts from the first to before the last.
    """
    pieces, rows, first = [], [], 0
    formats = [format_of(part) for part in parts]
    while first < len(formats):
        stop = first + 1
        while stop < len(formats) and formats[stop] == formats[first]:
            stop += 1
        pieces.append(piece(first, stop))
        rows.append(sum(part.slots for part in layout.parts[first:stop]) * layout.slot_rows)
        first = stop
    return pieces[0] if len(pieces) == 1 else MixedMatrix(tuple(pieces), tuple(rows))


def format_of(part: QuantizedArray | None) -> object:
    """Returns what parts must share to become one matrix; None for a float one."""
    if part is None:
        return None
    return (
        part.code,
        part.group_size,
        part.activations,
        part.fits_five_bits,
        part.scale.dtype,
        None if part.offset is None else part.offset.dtype,
        None if part.codebook is None else part.codebook.tobytes(),
        None if part.perm is None else part.perm.tobytes(),
    )


_Leaf: TypeAlias = Callable[[QuantizedArray], np.ndarray]
"""One of the arrays of a part."""


def _join(
    parts: Sequence[QuantizedArray],
    layout: RowLayout,
    columns: int,
    place: Callable[[_Leaf, tuple[int, int]], Any],
) -> QTensor:
    """Returns the matrix `[layout.num_rows, columns]` of parts of one format, padded with zeros.

    Args:
      place: makes an array of a shape from the same array of each part.

    Raises:
      ValueError: padding would have to cut a group.
    """
    model = parts[0]
    own_columns = model.shape[1]
    group_size = model.group_size
    if group_size == own_columns:
        group_size = columns
    if columns % group_size or (columns != own_columns and model.perm is not None):
        raise ValueError(
            f"a matrix with {own_columns} columns in groups of {model.group_size} cannot be padded "
            f"to the {columns} that the tensor-parallel split asks for; use fewer devices"
        )

    groups = (layout.num_rows, columns // group_size)
    return QTensor(
        place(attrgetter("qvalue"), (layout.num_rows, columns // (1 + model.is_4bit))),
        place(attrgetter("scale"), groups),
        None if model.offset is None else place(attrgetter("offset"), groups),
        model.codebook,
        model.perm,
        code=model.code,
        group_size=group_size,
        activations=model.activations,
        fits_five_bits=model.fits_five_bits,
        layout=LAYOUTS["cpu"],
    )


def _placed(
    parts: Sequence[QuantizedArray], layout: RowLayout, leaf: _Leaf, shape: tuple[int, int]
) -> np.ndarray:
    """Returns an array of the whole matrix: those of the parts where the layout has them."""
    first = leaf(parts[0])
    if len(parts) == 1 and first.shape == shape:
        return first  # nothing is fused, repeated or padded: a vocabulary is not held twice
    buffer = aligned_empty(shape, first.dtype, np.zeros)
    for part_idx, part in enumerate(parts):
        layout.place(buffer, part_idx, leaf(part))
    return buffer


def _check_split(value: Any, split: Any, devices: int) -> None:
    """Refuses to split the columns of a matrix where a device would get part of a group."""
    if split != "row":
        return
    for piece in value.pieces if isinstance(value, MixedMatrix) else (value,):
        if devices == 1 or not isinstance(piece, QTensor):
            continue
        columns, group_size = piece.shape[1], piece.group_size
        whole = NIBBLE_CHUNK if piece.is_4bit else 1
        if group_size != columns:
            whole = max(whole, group_size)
        if piece.perm is not None or columns % (devices * whole):
            raise ValueError(
                f"a quantized matrix with {columns} columns "
                + ("in act-order " if piece.perm is not None else f"in groups of {group_size} ")
                + f"cannot be split over {devices} devices; use fewer"
            )
