"""What a quantization method is: it knows which tensors make a matrix, checks them, reads them.

Everything here works on headers; a `Matrix` reads its data when it is asked to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from jaxinfer.checkpoint.checkpoint import CheckpointError, TensorInfo
from jaxinfer.checkpoint.safetensors import SafetensorsFile, StoredTensor
from jaxinfer.quantized_array import QuantizedArray

Shape = tuple[int | None, ...]
"""Sizes that a tensor must have; None stands for any size."""

SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Stored:
    """A tensor with the file that holds it."""

    file: SafetensorsFile
    tensor: StoredTensor

    @property
    def dtype(self) -> str:
        """Its type by safetensors' own name."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its stored shape."""
        return self.tensor.shape

    def read(self) -> np.ndarray:
        """Returns a read-only view of the file."""
        return self.file.read(self.tensor)

    def release(self) -> None:
        """Lets the kernel drop the pages of its data."""
        self.file.release(self.tensor)

    def error(self, rule: str) -> CheckpointError:
        """Returns the error that names the file, the tensor and `rule`."""
        return CheckpointError(f"{self.file.path}: tensor {self.tensor.name!r}: {rule}")


@dataclass
class Module:
    """The tensors `name.part` of one module whose weight is quantized, by part.

    Whatever a method does not ask for by the time it returns its Matrix is refused as surplus.
    """

    name: str
    parts: Mapping[str, Stored]
    asked: set[str] = field(default_factory=set)

    def need(self, part: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Stored:
        """Returns a part; raises CheckpointError where it is missing or not of such a type."""
        stored = self.find(part, dtypes, shape)
        if stored is None:
            present = next(iter(self.parts.values()))
            raise present.error(
                f"{self.name}.{part} is missing, which the quantized {self.name}.weight needs; "
                "the checkpoint is incomplete or its quantization_config is not its own"
            )
        return stored

    def find(self, part: str, dtypes: tuple[str, ...], shape: Shape | None = None) -> Stored | None:
        """Returns a part or None; raises CheckpointError where it is not of such a type."""
        self.asked.add(part)
        stored = self.parts.get(part)
        if stored is None:
            return None
        if stored.dtype not in dtypes:
            raise stored.error(f"has the dtype {stored.dtype}, not {' or '.join(dtypes)}")
        if shape is not None and not _matches(stored.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise stored.error(f"has the shape {list(stored.shape)}, not [{wanted}]")
        return stored

    def refuse_surplus(self) -> None:
        """Raises CheckpointError for a part that no method asked for."""
        for part, stored in self.parts.items():
            if part not in self.asked:
                raise stored.error(
                    f"does not belong to a weight quantized as {self.name}.weight is; correct "
                    "quantization_config in config.json"
                )


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix, known from headers.

    Attributes:
      dtype: a name of its format for people, such as `GPTQ-INT4`.
      codes: what `read` returns, abstract.
      read: reads and checks the data; its arrays may be read-only views of the file. Raises
        CheckpointError.
      is_certain: False where only the data can tell that an optional array of `codes` is not
        needed, or in which order columns are.
    """

    dtype: str
    codes: QuantizedArray
    read: Callable[[], QuantizedArray]
    is_certain: bool = True


@dataclass(frozen=True)
class Weight:
    """What a checkpoint yields under one name.

    Attributes:
      info: what is known before it is read.
      read: returns it; its arrays may be read-only views of the file.
      sources: the stored tensors whose pages can go once it is in use.
    """

    info: TensorInfo
    read: Callable[[], np.ndarray | QuantizedArray]
    sources: tuple[Stored, ...]


@runtime_checkable
class Method(Protocol):
    """One quantization of a checkpoint, made from its quantization_config."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names, below a module's, of every tensor that a quantized weight may consist of.

        `("qweight", "scales")`, for example, or `("weight", "weight.absmax")`. A tensor `a.b.PART`
        belongs to the module `a.b`; the longest part counts. A module that has none of them, or
        only a `weight` of a float type, is not quantized: its tensors stay what they are.
        """

    @property
    def ignored(self) -> tuple[str, ...]:
        """Endings of names of tensors that are not read, with one line in the log."""

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is, checked as far as headers go; raises CheckpointError."""


def _matches(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or size == want for size, want in zip(shape, wanted, strict=True)
    )
