"""Which weight gets which format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kernels.quantized_matmul import FORMATS, QFormat
from kernels.quantized_matmul.format import GROUP_SIZES, LAYOUTS


@dataclass(frozen=True)
class QuantScheme:
    """The formats of one model.

    Embeddings, and heads tied to them, stay in the weight dtype, as do norms and biases.

    Attributes:
      linear: of the layers' matrices.
      head: of a head that is not the embedding: it decides every token, so 8 bits at least.
    """

    linear: QFormat
    head: QFormat


SCHEMES: Mapping[str, QuantScheme] = {
    name: QuantScheme(FORMATS[name], FORMATS["int8"] if "4" in name else FORMATS[name])
    for name in ("int8", "w8a8", "fp8", "int4", "nf4")
}
"""Schemes by the names `--quant` takes."""


def width_multiple(fmt: QFormat | None) -> int:
    """Returns what a padded width should be a multiple of, so that the format fits unchanged.

    It is the largest group and a TPU's lanes: rows of other widths are copied at every call there.
    """
    return 1 if fmt is None else max(GROUP_SIZES)


def fit_format(fmt: QFormat, in_features: int, devices: int, platform: str) -> QFormat:
    """Returns the format with the largest group, not above its own, that divides the width.

    Args:
      in_features: I of the matrix.
      devices: into how many parts I is split; each part holds whole groups.
      platform: whose layout the codes must fit as well.

    Raises:
      ValueError: no group size fits; names the width and what would.
    """
    width = in_features // devices
    chunk = 1
    if fmt.code.endswith("int4") and not LAYOUTS[platform].native_int4:
        chunk = LAYOUTS[platform].nibble_chunk
    sizes = [size for size in GROUP_SIZES if size <= (fmt.group_size or 0) and not width % size]
    if in_features % devices or width % chunk or (fmt.group_size is not None and not sizes):
        raise ValueError(
            f"a matrix with {in_features} input features, split over {devices} devices, cannot be "
            f"quantized to {fmt.code}: each part must be a multiple of "
            f"{max(chunk, min(GROUP_SIZES) if fmt.group_size else 1)}. Leave the quantization out"
        )
    return fmt if fmt.group_size is None else replace(fmt, group_size=sizes[-1])
