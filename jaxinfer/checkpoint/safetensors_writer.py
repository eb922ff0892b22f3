"""Writes a model's tensors as safetensors, in shards with an index, one tensor in memory at a time.

Names, dtypes and shapes come first, so headers are written before any data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.directory import INDEX, SINGLE_FILE
from jaxinfer.checkpoint.safetensors import RAW_DTYPES

SHARD_BYTES = 5_000_000_000
"""What a file holds at most, unless one tensor alone is larger: the hub's own habit."""

_DTYPE_NAMES = {dtype: name for name, dtype in RAW_DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to come; `dtype` is one of RAW_DTYPES' names."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * RAW_DTYPES[self.dtype].itemsize


def dtype_name(dtype: np.dtype) -> str:
    """Returns safetensors' name of a dtype.

    Raises:
      KeyError: it has none that can be read again.
    """
    return _DTYPE_NAMES[np.dtype(dtype)]


class SafetensorsWriter:
    """The files of one directory; `write` takes each tensor once, `finish` closes the account."""

    def __init__(
        self, directory: Path, groups: Iterable[Sequence[Entry]], shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Writes headers and index, and reserves the data's space.

        Args:
          directory: exists, and holds no weights.
          groups: every tensor to come; those of a group stay in one file.
          shard_bytes: of a file's data, at most.
        """
        shards = _divide(groups, shard_bytes)
        self.num_bytes = sum(entry.num_bytes for shard in shards for entry in shard)
        self._places: dict[str, tuple[Path, int, Entry]] = {}
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            name = SINGLE_FILE
            if len(shards) > 1:
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            self._begin(directory / name, shard)
            weight_map |= {entry.name: name for entry in shard}
        if len(shards) > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, array: np.ndarray) -> None:
        """Writes one tensor.

        Raises:
          ValueError: it is not expected, or not with this dtype or shape.
        """
        if name not in self._places:
            raise ValueError(f"tensor {name!r} is not expected, or has been written already")
        path, offset, entry = self._places.pop(name)
        found = Entry(name, dtype_name(array.dtype), array.shape)
        if found != entry:
            raise ValueError(f"{path}: tensor {name!r} is {found}, but the header says {entry}")
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Raises ValueError where a tensor has not come."""
        if self._places:
            raise ValueError(f"tensors never came: {', '.join(list(self._places)[:5])}")

    def _begin(self, path: Path, shard: list[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Wide types first, as readers want every tensor aligned to its own type.
        shard = sorted(shard, key=lambda entry: -RAW_DTYPES[entry.dtype].itemsize)
        for entry in shard:
            offsets = [end, end + entry.num_bytes]
            header[entry.name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
            end = offsets[1]
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % _ALIGNMENT)
        begin = 8 + len(raw)
        with path.open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(begin + end)
        for entry in shard:
            offset = begin + header[entry.name]["data_offsets"][0]
            self._places[entry.name] = path, offset, entry


def _divide(groups: Iterable[Sequence[Entry]], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = []
    room = 0
    for group in groups:
        size = sum(entry.num_bytes for entry in group)
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].extend(group)
        room -= size
    return shards
