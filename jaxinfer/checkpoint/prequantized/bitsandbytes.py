"""bitsandbytes: nf4 and fp4 in blocks with a table of values, and LLM.int8() by rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.method import Matrix, Module, Stored
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.checkpoint.safetensors import parse_json_object
from jaxinfer.quantized_array import QuantizedArray, abstract_array

STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
MAX_STATE_BYTES = 1 << 16
_MAX_BLOCK = 1 << 16
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_STORAGE = ("U8", "I8", "BF16", "F16", "F32")  # bnb_4bit_quant_storage: the bytes are the same


class Bitsandbytes:
    """quant_method `bitsandbytes`, load_in_4bit or load_in_8bit."""

    parts = (
        *("weight", "weight.absmax", "weight.quant_map", *_NESTED, *STATES.values()),
        *("SCB", "weight_format"),
    )
    ignored = ()

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        self._in_4bit = settings.boolean("load_in_4bit", False)
        if self._in_4bit == settings.boolean("load_in_8bit", False):
            raise settings.error("load_in_4bit", "either it or load_in_8bit must be true")
        self._kind = settings.text("bnb_4bit_quant_type", tuple(STATES), "fp4")

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        return _weight_4bit(module, self._kind) if self._in_4bit else _weight_8bit(module)


def _weight_8bit(module: Module) -> Matrix:
    weight = module.need("weight", ("I8",), (None, None))
    rows, columns = weight.shape
    scb = module.need("SCB", ("F32",), (rows,))
    layout = module.find("weight_format", ("U8", "I8"), ())
    codes = packing.abstract_affine((rows, columns), 8, columns, "F32")
    read = partial(_read_8bit, weight, scb, layout)
    return Matrix("BNB-INT8", codes, read)


def _read_8bit(weight: Stored, scb: Stored, layout: Stored | None) -> QuantizedArray:
    if layout is not None and layout.read() != 0:
        raise layout.error(f"the layout {layout.read()} is not supported, only 0 (row by row)")
    with np.errstate(invalid="ignore"):  # a scale may be NaN
        scale = scb.read()[:, None] / np.float32(127)
    qvalue = weight.read()
    return QuantizedArray(qvalue, scale, code="int8", group_size=qvalue.shape[1])


def _weight_4bit(module: Module, kind: str) -> Matrix:
    state_tensor = module.need(STATES[kind], ("U8",), (None,))
    if state_tensor.tensor.num_bytes > MAX_STATE_BYTES:
        raise state_tensor.error(f"is larger than {MAX_STATE_BYTES} bytes")
    where = f"{state_tensor.file.path}: tensor {state_tensor.tensor.name!r}"
    state = Settings(parse_json_object(state_tensor.read().tobytes(), where), where)
    state.text("quant_type", (kind,), kind)
    rows, columns = _parse_shape(state)
    weight = module.need("weight", _STORAGE)
    if weight.tensor.num_bytes * 2 != rows * columns:
        raise weight.error(
            f"has {weight.tensor.num_bytes} bytes, but 4-bit codes of {[rows, columns]} have "
            f"{rows * columns / 2:g}"
        )
    packing.check_width(weight, 4, columns)
    block = _parse_size(state, "blocksize")
    if columns % block:
        raise weight.error(
            f"blocks of {block} do not divide its width, {columns}: blocks over several rows are "
            "not supported; leave this matrix unquantized or quantize it in smaller blocks"
        )
    group_size = packing.group_of(weight, block, columns)
    num_blocks = rows * columns // block
    codebook = module.need("weight.quant_map", ("F32",), (16,))
    nested = "weight.nested_absmax" in module.parts or "weight.nested_quant_map" in module.parts
    absmax = module.need("weight.absmax", ("U8",) if nested else ("F32",), (num_blocks,))
    second = _Nested(module, state, num_blocks) if nested else None
    shape = rows, columns
    codes = abstract_array(
        shape, "uint4", group_size, np.dtype(np.float32), codebook=codebook.read()
    )
    read = partial(_read_4bit, shape, block, group_size, weight, codebook, absmax, second)
    return Matrix(f"BNB-{kind.upper()}", codes, read)


class _Nested:
    """The second quantization: absmax as bytes, in blocks with a table and a scale."""

    def __init__(self, module: Module, state: Settings, num_blocks: int) -> None:
        self.block = _parse_size(state, "nested_blocksize")
        state.text("nested_dtype", ("float32",), "float32")
        offset = state.values.get("nested_offset")
        if not isinstance(offset, (int, float)) or not abs(offset) < 1e30:  # nor NaN
            raise state.error("nested_offset", "must be a number")
        self.offset = np.float32(offset)
        self.table = module.need("weight.nested_quant_map", ("F32",), (256,))
        count = -(-num_blocks // self.block)
        self.scale = module.need("weight.nested_absmax", ("F32",), (count,))

    def dequantize(self, codes: np.ndarray) -> np.ndarray:
        """Returns absmax in float32, rounded after each operation as bitsandbytes does."""
        scale = np.repeat(self.scale.read(), self.block)[: len(codes)]
        with np.errstate(invalid="ignore", over="ignore"):  # a scale may be inf or NaN
            return self.table.read()[codes] * scale + self.offset


def _read_4bit(
    shape: tuple[int, int],
    block: int,
    group_size: int,
    weight: Stored,
    codebook: Stored,
    absmax: Stored,
    nested: _Nested | None,
) -> QuantizedArray:
    rows, columns = shape
    raw = weight.read().reshape(-1).view(np.uint8).reshape(rows, columns // 2)
    qvalue = packing.pack_rows(
        shape, 4, lambda of_block: packing.unpack_bytes_high_first(raw[of_block])
    )
    scale = absmax.read() if nested is None else nested.dequantize(absmax.read())
    scale = packing.spread_groups(scale.reshape(rows, -1), block, columns, group_size)
    return QuantizedArray(
        qvalue,
        np.ascontiguousarray(scale),
        codebook=codebook.read(),
        code="uint4",
        group_size=group_size,
    )


def _parse_shape(state: Settings) -> tuple[int, int]:
    shape = state.values.get("shape")
    if not (
        isinstance(shape, list)
        and len(shape) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in shape)
    ):
        raise state.error("shape", "must be two positive sizes, rows and columns")
    return shape[0], shape[1]


def _parse_size(state: Settings, key: str) -> int:
    size = state.values.get(key)
    if type(size) is not int or not 0 < size <= _MAX_BLOCK:
        raise state.error(key, f"must be a size up to {_MAX_BLOCK}")
    return size
