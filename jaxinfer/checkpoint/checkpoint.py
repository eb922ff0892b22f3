"""What every checkpoint looks like from outside, whatever its file format.

Knows no format and no model: Hugging Face names and layouts, numpy arrays, plain dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm

from jaxinfer.quantized_array import QuantizedArray

TokenizerSource = Path | Mapping[str, Any]
"""A directory with tokenizer files, or the metadata of a GGUF file (raw key -> plain value)."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file, the place and the rule."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, known before any of its data is read.

    Attributes:
      name: its Hugging Face name.
      shape: its logical shape, `[O, I]` for a matrix.
      dtype: the stored type by the format's own name, such as `BF16` or `Q4_K`.
      num_bytes: its size in the file.
      codes: of a quantized matrix, the QuantizedArray it will be, abstract; None for plain floats.
      is_certain: it will be exactly that. Else only the data tells that offsets are not needed, or
        in which order columns are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    codes: QuantizedArray | None = None
    is_certain: bool = True

    @property
    def loaded_bytes(self) -> int | None:
        """Of a quantized matrix, the bytes of its codes, or more where it is not certain."""
        return None if self.codes is None else self.codes.num_bytes

    @property
    def group_size(self) -> int | None:
        """Of a quantized matrix, the weights per scale."""
        return None if self.codes is None else self.codes.group_size


@runtime_checkable
class Checkpoint(Protocol):
    """A validated checkpoint; every structural check has passed once it exists."""

    @property
    def path(self) -> Path:
        """The directory or the file it was opened from."""

    @property
    def model_type(self) -> str:
        """Hugging Face's `model_type`."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """`config.json`, or the same keys synthesized from GGUF metadata."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or the end-of-sequence ids that GGUF metadata gives."""

    @property
    def tensor_infos(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, in file order."""

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Where the tokenizer is to be read from."""

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
        """Yields (name, array), one tensor at a time.

        Float types keep their stored dtype and may be read-only views of the file; quantized
        matrices come as QuantizedArray. `progress` shows a bar over the file's bytes.
        """


def stream_tensors(
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], np.ndarray | QuantizedArray],
    release: Callable[[str], None],
    progress: bool,
) -> Iterator[tuple[str, np.ndarray | QuantizedArray]]:
    """Yields what `read(name)` returns for every tensor, and releases its pages afterwards."""
    total_bytes = sum(info.num_bytes for info in infos.values())
    with tqdm(
        total=total_bytes, unit="B", unit_scale=True, desc="Loading weights", disable=not progress
    ) as bar:
        for name, info in infos.items():
            yield name, read(name)
            release(name)
            bar.update(info.num_bytes)


def name_some(names: list[str], limit: int = 5) -> str:
    """Returns the first names and, where there are more, their count: `a, b and 7 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
