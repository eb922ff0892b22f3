"""The GGUF container: metadata and tensor table of one file, read once and believed in nothing.

Every length is checked against what the file still holds before anything is allocated by it.
Knows no architecture and no name mapping. Little endian, versions 2 and 3.
"""

from __future__ import annotations

import reprlib
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import CheckpointError
from jaxinfer.checkpoint.gguf_blocks import (
    GGML_TYPES,
    UNSUPPORTED_TYPE_NAMES,
    GgmlType,
    abstract_blocks,
    decode_blocks,
)
from jaxinfer.checkpoint.mapped_file import MappedFile
from jaxinfer.quantized_array import QuantizedArray

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_LENGTH = 1 << 22
MAX_TENSORS = 1 << 16
MAX_KEYS = 1 << 16
MAX_HEADER_BYTES = 1 << 26
"""Bounds what a hostile file can make us hold; 262,144 tokens take a tenth of it."""
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {  # value type -> numpy type
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty name, a type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type, an offset


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table; `shape` is row-major (`[O, I]`), `offset` from file start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GgmlType
    offset: int
    num_bytes: int

    @property
    def codes(self) -> QuantizedArray | None:
        """The QuantizedArray it is read as, abstract, or None where it is read as floats."""
        if self.ggml_type.format is None or len(self.shape) != 2:
            return None
        return abstract_blocks((self.shape[0], self.shape[1]), self.ggml_type)


class GgufFile:
    """One GGUF file with its `metadata` (plain values) and its `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Reads and checks everything but the tensor data; raises CheckpointError."""
        self.path = path
        self._file = MappedFile(path)
        cursor = _Cursor(self._file)
        num_tensors, num_keys = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_keys)
        self.tensors = _read_tensor_table(
            cursor, num_tensors, _alignment(path, self.metadata), self._file.size
        )

    def read(self, tensor: GgufTensor) -> np.ndarray | QuantizedArray:
        """Returns a tensor's values.

        Float types come as a read-only view, quantized ones as a QuantizedArray where they are
        matrices and else, as for a vector, as float32.
        """
        ggml_type = tensor.ggml_type
        if ggml_type.dtype is not None:
            return self._file.view(ggml_type.dtype, tensor.shape, tensor.offset)
        num_blocks = tensor.num_bytes // ggml_type.block_bytes
        blocks = self._file.view(
            np.dtype(np.uint8), (num_blocks, ggml_type.block_bytes), tensor.offset
        )
        array = decode_blocks(blocks, ggml_type, prod(tensor.shape[:-1]))
        return array if len(tensor.shape) == 2 else array.dequantize().reshape(tensor.shape)

    def release(self, tensor: GgufTensor) -> None:
        """Lets the kernel drop the pages of a tensor's data."""
        self._file.release(tensor.offset, tensor.num_bytes)


class _Cursor:
    """A position in a mapped file. Invariant: `offset <= size`."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self.size = min(file.size, MAX_HEADER_BYTES)
        self.offset = 0
        self._data = file.data
        self._file = file

    def error(self, rule: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: at byte {self.offset}: {rule}")

    def require(self, num_bytes: int, what: str) -> None:
        left = self.size - self.offset
        if num_bytes > left:
            raise self.error(f"{what} needs {num_bytes} bytes, but only {left} are left")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        begin, self.offset = self.offset, self.offset + num_bytes
        return self._data[begin : self.offset]

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def count(self, what: str, limit: int, min_item_bytes: int) -> int:
        """A 64-bit count, at most `limit` and of no more items than the rest of the file holds."""
        count = self.u64(what)
        if count > limit:
            raise self.error(f"{what} is {count}, more than {limit}")
        self.require(count * min_item_bytes, f"{what} {count}")
        return count

    def string(self, what: str, max_bytes: int) -> str:
        raw = self.take(self.count(f"the length of {what}", max_bytes, 1), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Reads `count` strings; vocabularies have hundreds of thousands, so the loop is tight."""
        data, unpack, offset = self._data, _U64.unpack_from, self.offset
        raw: list[bytes] = []
        for _ in range(count):
            begin = offset + 8
            length = unpack(data, offset)[0] if begin <= self.size else MAX_STRING_BYTES + 1
            offset = begin + length
            if length > MAX_STRING_BYTES or offset > self.size:
                self.offset = min(begin - 8, self.size)
                raise self.error(f"string {len(raw)} of {count} in {what} is cut off or too long")
            raw.append(data[begin:offset])
        self.offset = offset
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError as error:
            raise self.error(f"a string in {what} is not UTF-8") from error

    def numbers(self, value_type: int, count: int, what: str) -> list[Any]:
        dtype = _NUMBERS[value_type]
        self.require(count * dtype.itemsize, what)
        array = self._file.view(dtype, (count,), self.offset)
        self.offset += count * dtype.itemsize
        if value_type != _BOOL:
            return list(array.tolist())
        if (array > 1).any():
            raise self.error(f"{what} holds a truth value that is neither 0 nor 1")
        return list(array.astype(bool).tolist())


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "the magic")
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path}: not a GGUF file (starts with {magic!r})")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian version {swapped}" if swapped in (1, 2, 3) else f"version {version}"
        raise CheckpointError(
            f"{cursor.path}: GGUF {kind} is not supported; convert it to little-endian version 3"
        )
    num_tensors = cursor.count("the tensor count", MAX_TENSORS, _MIN_TENSOR_BYTES)
    return num_tensors, cursor.count("the key count", MAX_KEYS, _MIN_KEY_BYTES)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} occurs twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"the value of {key!r}"
    value_type = cursor.u32(f"the type of {key!r}")
    if value_type == _STRING:
        return cursor.string(what, MAX_STRING_BYTES)
    if value_type in _NUMBERS:
        return cursor.numbers(value_type, 1, what)[0]
    if value_type != _ARRAY:
        raise cursor.error(f"{what} has the unknown type {value_type}")
    item_type = cursor.u32(f"the item type of {key!r}")
    if item_type == _STRING:
        return cursor.strings(cursor.count(f"the length of {key!r}", MAX_ARRAY_LENGTH, 8), what)
    if item_type in _NUMBERS:
        item_bytes = _NUMBERS[item_type].itemsize
        count = cursor.count(f"the length of {key!r}", MAX_ARRAY_LENGTH, item_bytes)
        return cursor.numbers(item_type, count, what)
    kind = "arrays (nested)" if item_type == _ARRAY else f"items of the unknown type {item_type}"
    raise cursor.error(f"{what} is an array of {kind}, which is not supported")


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    valid = isinstance(alignment, int) and 1 <= alignment <= MAX_ALIGNMENT
    if not valid or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: general.alignment is {reprlib.repr(alignment)}, not a power of "
            f"two up to {MAX_ALIGNMENT}"
        )
    return int(alignment)


def _read_tensor_table(
    cursor: _Cursor, count: int, alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    entries = [_read_tensor_entry(cursor, index) for index in range(count)]
    data_begin = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, ggml_type, relative_offset in entries:
        where = f"{cursor.path}: tensor {name!r}"
        if name in tensors:
            raise CheckpointError(f"{where} occurs twice")
        if relative_offset % alignment:
            raise CheckpointError(
                f"{where}: offset {relative_offset} is not aligned to {alignment}"
            )
        num_bytes = prod(shape) // ggml_type.block_size * ggml_type.block_bytes
        offset = data_begin + relative_offset
        if offset + num_bytes > file_bytes:
            raise CheckpointError(
                f"{where}: its data ends at byte {offset + num_bytes}, beyond the end of the file "
                f"({file_bytes} bytes); the file is damaged or its download is not complete"
            )
        tensors[name] = GgufTensor(name, shape, ggml_type, offset, num_bytes)
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for left, right in pairwise(by_offset):
        if right.offset < left.offset + left.num_bytes:
            raise CheckpointError(
                f"{cursor.path}: tensors {left.name!r} and {right.name!r} overlap"
            )
    return tensors


def _read_tensor_entry(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], GgmlType, int]:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.u32(f"the dimension count of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(f"a dimension of {what}") for _ in range(num_dims)]
    if min(dims) == 0 or prod(dims) >= 1 << 63:
        raise cursor.error(f"{what} has the impossible dimensions {dims}")
    number = cursor.u32(f"the type of {what}")
    ggml_type = GGML_TYPES.get(number)
    if ggml_type is None:
        stored = UNSUPPORTED_TYPE_NAMES.get(number, f"unknown ({number})")
        supported = ", ".join(known.name for known in GGML_TYPES.values())
        raise cursor.error(f"{what} has the type {stored}; supported are {supported}")
    if dims[0] % ggml_type.block_size:
        raise cursor.error(
            f"{what} has rows of {dims[0]} weights, not a multiple of {ggml_type.block_size} as "
            f"its type {ggml_type.name} needs"
        )
    return name, tuple(reversed(dims)), ggml_type, cursor.u64(f"the offset of {what}")
