"""A GGUF model, whole or split into parts, as a Checkpoint."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import (
    CheckpointError,
    TensorInfo,
    name_some,
    stream_tensors,
)
from jaxinfer.checkpoint.gguf import GgufFile, GgufTensor
from jaxinfer.checkpoint.gguf_config import (
    architecture_of,
    generation_config_from_gguf,
    hf_config_from_gguf,
)
from jaxinfer.checkpoint.gguf_names import ARCHITECTURES, ROPE_FACTORS
from jaxinfer.quantized_array import QuantizedArray

MAX_PARTS = 1000
MAX_ROPE_FACTORS = 1 << 16
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint:
    """A GGUF file; of a split one, any part stands for all."""

    def __init__(self, path: Path) -> None:
        """Opens and checks every part; raises CheckpointError."""
        self.path = path
        parts = _open_parts(path)
        metadata = parts[0].metadata
        self._architecture = ARCHITECTURES[architecture_of(path, metadata)]
        stored = _merge_tensors(parts)
        rope_part, rope_tensor = stored.pop(ROPE_FACTORS, (None, None))
        self.hf_config = hf_config_from_gguf(
            path,
            metadata,
            {name: tensor.shape for name, (_, tensor) in stored.items()},
            _rope_factors(rope_part, rope_tensor) if rope_part and rope_tensor else None,
        )
        self.model_type: str = self.hf_config["model_type"]
        self.generation_config = generation_config_from_gguf(metadata)
        self.tokenizer_source: Mapping[str, Any] = metadata
        self._stored = self._rename(stored)
        self.tensor_infos = {
            name: TensorInfo(
                name,
                tensor.shape,
                tensor.ggml_type.name,
                tensor.num_bytes,
                tensor.codes,
            )
            for name, (_, tensor) in self._stored.items()
        }

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
        """Yields (Hugging Face name, array in Hugging Face layout), one tensor at a time."""
        return stream_tensors(self.tensor_infos, self._read, self._release, progress)

    def _rename(
        self, stored: Mapping[str, tuple[GgufFile, GgufTensor]]
    ) -> dict[str, tuple[GgufFile, GgufTensor]]:
        names = {name: self._architecture.hf_name(name) for name in stored}
        unknown = [name for name, hf_name in names.items() if hf_name is None]
        if unknown:
            raise CheckpointError(
                f"{self.path}: the architecture {self.model_type} has no use for the tensors "
                f"{name_some(unknown)}"
            )
        return {hf_name: stored[name] for name, hf_name in names.items() if hf_name is not None}

    def _read(self, name: str) -> np.ndarray | QuantizedArray:
        part, tensor = self._stored[name]
        try:
            return self._architecture.restore(name, part.read(tensor), self.hf_config)
        except ValueError as error:
            raise CheckpointError(f"{part.path}: tensor {tensor.name!r}: {error}") from error

    def _release(self, name: str) -> None:
        part, tensor = self._stored[name]
        part.release(tensor)


def _rope_factors(part: GgufFile, tensor: GgufTensor) -> np.ndarray:
    """The divisors of rotary frequencies, of whatever shape the file gives them."""
    if math.prod(tensor.shape) > MAX_ROPE_FACTORS:
        raise CheckpointError(
            f"{part.path}: tensor {tensor.name!r} has the shape {tensor.shape}; one number for "
            "each pair of a head's dimensions is expected"
        )
    factors = part.read(tensor)
    return factors.dequantize() if isinstance(factors, QuantizedArray) else factors


def _open_parts(path: Path) -> list[GgufFile]:
    opened = GgufFile(path)
    count = opened.metadata.get("split.count", 1)
    if count in (0, 1):
        return [opened]
    match = _PART_NAME.fullmatch(path.name)
    if not match or not isinstance(count, int) or int(match[3]) != count or count > MAX_PARTS:
        raise CheckpointError(
            f"{path}: split.count is {reprlib.repr(count)}, so the name must end in "
            f"NNNNN-of-NNNNN.gguf with that count, at most {MAX_PARTS}: restore the parts' "
            "names, or merge them"
        )
    paths = [
        path.with_name(f"{match[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing: {name_some(missing)}"
        )
    parts = [opened if part == path else GgufFile(part) for part in paths]
    for number, part in enumerate(parts):
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number, count):
            raise CheckpointError(
                f"{part.path}: split.no and split.count are {reprlib.repr(found)}, but the "
                f"name says {(number, count)}"
            )
    return parts


def _merge_tensors(parts: list[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    merged: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in merged:
                raise CheckpointError(
                    f"{part.path}: tensor {name!r} is also in {merged[name][0].path.name}"
                )
            merged[name] = part, tensor
    expected = parts[0].metadata.get("split.tensors.count", len(merged))
    if expected != len(merged):
        raise CheckpointError(
            f"{parts[0].path}: split.tensors.count is {reprlib.repr(expected)}, but the parts "
            f"hold {len(merged)}"
        )
    return merged
