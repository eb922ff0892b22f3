"""The safetensors container: the header of one file, checked against the format's own rules.

Knows no model and no directory.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.checkpoint import CheckpointError
from jaxinfer.checkpoint.mapped_file import MappedFile

MAX_HEADER_BYTES = 1 << 24
MAX_DIMS = 8
FLOAT_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes a weight may have."""

OTHER_DTYPE_BYTES = {
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
"""Dtypes whose size we know, so that a file may hold them beside the weights."""

RAW_DTYPES = FLOAT_DTYPES | {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The dtypes that can be read: those of weights and those that quantized weights consist of."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One safetensors file and its `tensors` by name, in the order of their data."""

    def __init__(self, path: Path) -> None:
        """Reads and checks the header; raises CheckpointError."""
        self.path = path
        self._file = MappedFile(path)
        header, data_begin = self._read_header()
        header.pop("__metadata__", None)
        entries = [self._entry(name, entry, data_begin) for name, entry in header.items()]
        entries.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
        end = data_begin
        for tensor in entries:
            if tensor.offset != end:
                problem = "overlaps its neighbour" if tensor.offset < end else "follows a hole"
                raise self._error(tensor.name, f"its data at byte {tensor.offset} {problem}")
            end += tensor.num_bytes
        if end != self._file.size:
            raise CheckpointError(
                f"{path}: the header describes {end} bytes, but the file has {self._file.size}; "
                "the file is damaged or its download is not complete"
            )
        self.tensors = {tensor.name: tensor for tensor in entries}

    def read(self, tensor: StoredTensor) -> np.ndarray:
        """Returns a tensor of one of RAW_DTYPES as a read-only view of the file."""
        return self._file.view(RAW_DTYPES[tensor.dtype], tensor.shape, tensor.offset)

    def release(self, tensor: StoredTensor) -> None:
        """Lets the kernel drop the pages of a tensor's data."""
        self._file.release(tensor.offset, tensor.num_bytes)

    def _error(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: tensor {name!r}: {rule}")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = self._file.size
        header_bytes = int.from_bytes(self._file.data[:8], "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: at byte 0: a header of {header_bytes} bytes does not fit into the "
                f"file ({size} bytes) or the limit ({MAX_HEADER_BYTES}); not a safetensors file, "
                "or cut off"
            )
        data_begin = 8 + header_bytes
        header = parse_json_object(self._file.data[8:data_begin], f"{self.path}: at byte 8: header")
        return header, data_begin

    def _entry(self, name: str, entry: Any, data_begin: int) -> StoredTensor:
        if not isinstance(entry, dict):
            raise self._error(name, "its header entry is not an object")
        dtype: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        offsets: Any = entry.get("data_offsets")
        if not (isinstance(dtype, str) and (dtype in FLOAT_DTYPES or dtype in OTHER_DTYPE_BYTES)):
            raise self._error(name, f"the dtype {dtype!r} is not supported")
        if not (_are_sizes(shape) and 0 not in shape and len(shape) <= MAX_DIMS):
            raise self._error(name, f"its shape is not a list of at most {MAX_DIMS} positive sizes")
        if not (_are_sizes(offsets) and len(offsets) == 2):
            raise self._error(name, "its data_offsets are not two sizes")
        begin, end = offsets
        itemsize = OTHER_DTYPE_BYTES.get(dtype) or FLOAT_DTYPES[dtype].itemsize
        if end - begin != prod(shape) * itemsize:
            raise self._error(
                name,
                f"data_offsets {offsets} span {end - begin} bytes, but {dtype} {shape} has "
                f"{prod(shape) * itemsize}",
            )
        if data_begin + end > self._file.size:
            raise self._error(
                name,
                f"its data ends at byte {data_begin + end}, beyond the end of the file "
                f"({self._file.size} bytes); the file is damaged or its download is not complete",
            )
        return StoredTensor(name, dtype, tuple(shape), data_begin + begin, end - begin)


def parse_json_object(raw: bytes, what: str) -> dict[str, Any]:
    """Returns the object in `raw`; raises CheckpointError for anything else and for double keys."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: not a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = sorted(key for key, _ in pairs)
        double = next(left for left, right in pairwise(keys) if left == right)
        raise ValueError(f"the key {double!r} occurs twice")
    return result


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 1 << 63 for item in value
    )
