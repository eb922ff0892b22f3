"""The arrays of a QuantizedArray as they are: what `jaxinfer convert` writes in our own format.

Of a matrix `a.weight` there are `a.weight.qvalue`, `.scale` and maybe `.offset` or `.codebook`;
their dtypes and shapes say everything else, and quantization_config what activations become.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxinfer.checkpoint.prequantized import packing
from jaxinfer.checkpoint.prequantized.method import SCALE_DTYPES, Matrix, Module, Stored
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.checkpoint.safetensors import RAW_DTYPES
from jaxinfer.quantized_array import QuantizedArray, abstract_array

QUANT_METHOD = "jaxinfer"
VERSION = 1

_CODE_DTYPES = ("U8", "I8", "F8_E4M3")
_CODEBOOK_SIZE = 16


def stored_arrays(name: str, weight: QuantizedArray) -> dict[str, np.ndarray]:
    """Returns the tensors that stand for the matrix `name`.

    Raises:
      ValueError: its columns are permuted.
    """
    if weight.perm is not None:
        raise ValueError(f"tensor {name}: permuted columns cannot be stored")
    arrays = {
        "qvalue": weight.qvalue,
        "scale": weight.scale,
        "offset": weight.offset,
        "codebook": weight.codebook,
    }
    return {f"{name}.{part}": array for part, array in arrays.items() if array is not None}


class StoredArrays:
    """quant_method `jaxinfer`, version 1."""

    parts = ("weight.qvalue", "weight.scale", "weight.offset", "weight.codebook")
    ignored = ()

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        settings.integer("version", (VERSION,))
        is_rounded = settings.text("activations", ("float", "int8"), "float") == "int8"
        self._activations: Literal["float", "int8"] = "int8" if is_rounded else "float"

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        qvalue = module.need("weight.qvalue", _CODE_DTYPES, (None, None))
        bits = 4 if qvalue.dtype == "U8" else 8
        rows, columns = qvalue.shape[0], qvalue.shape[1] * 8 // bits
        packing.check_width(qvalue, bits, columns)
        scale = module.need("weight.scale", SCALE_DTYPES, (rows, None))
        block, rest = divmod(columns, scale.shape[1])
        if rest:
            raise scale.error(f"{scale.shape[1]} groups do not divide {columns} columns evenly")
        group_size = packing.group_of(scale, block, columns)
        if group_size != block:
            raise scale.error(f"groups of {block} columns are not supported")
        offset = module.find("weight.offset", (scale.dtype,), scale.shape)
        codebook = module.find("weight.codebook", ("F32",), (_CODEBOOK_SIZE,))
        if codebook is not None and (bits == 8 or offset is not None):
            raise codebook.error("goes with 4-bit codes and without an offset only")
        if offset is not None and qvalue.dtype == "F8_E4M3":
            raise offset.error("float8 codes have none")
        code = _code(qvalue.dtype, offset is not None or codebook is not None)
        codes = abstract_array(
            (rows, columns),
            code,
            group_size,
            RAW_DTYPES[scale.dtype],
            has_offset=offset is not None,
            codebook=_read(codebook),
            activations=self._activations,
        )

        def read() -> QuantizedArray:
            return QuantizedArray(
                qvalue.read(),
                scale.read(),
                _read(offset),
                _read(codebook),
                code=code,
                group_size=group_size,
                activations=self._activations,
            )

        return Matrix(f"JAXINFER-{code.upper()}", codes, read)


def _code(dtype: str, is_unsigned: bool) -> Literal["int8", "fp8", "int4", "uint4"]:
    if dtype == "U8":
        return "uint4" if is_unsigned else "int4"
    return "int8" if dtype == "I8" else "fp8"


def _read(stored: Stored | None) -> np.ndarray | None:
    return None if stored is None else stored.read()
