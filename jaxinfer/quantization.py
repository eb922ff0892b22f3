"""Which weight gets which format, by name, by width, and by what memory allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import jax
import numpy as np

from kernels.quantized_matmul import FORMATS, QFormat, QTensor, prepare, quantize
from kernels.quantized_matmul.format import GROUP_SIZES, LAYOUTS

AUTO = "auto"
AUTO_CANDIDATES: tuple[str | None, ...] = (None, "int8", "int4")
"""What `auto` chooses from, the widest first; None leaves the weights as they are."""

KV_SHARE = 0.25
"""Share of free memory that `auto` leaves to the KV cache and to temporaries."""

_BLOCK_WEIGHTS = 1 << 18  # quantized at once on the host: little memory, few programs
_GGML_8 = QFormat("int8", 32, rounding="ggml", scale_dtype="float16")
_GGML_4 = QFormat("int4", 32, rounding="ggml", scale_dtype="float16")
_HQQ_8 = QFormat("int8", 64, has_offset=True, rounding="hqq")
_HQQ_4 = QFormat("uint4", 64, has_offset=True, rounding="hqq", scale_dtype="float16")


@dataclass(frozen=True)
class QuantScheme:
    """The formats of one model; None keeps a matrix in the weight dtype, as norms and biases are.

    The embedding and the head decide every token, so they are kept one tier higher than the layers'
    matrices: 8 bits beside 4, the weight dtype beside 8.

    Attributes:
      linear: of the layers' matrices.
      head: of a head that is not the embedding.
      embedding: of the embedding, and of a head tied to it.
    """

    linear: QFormat
    head: QFormat | None
    embedding: QFormat | None = None


def _scheme(linear: QFormat, tier_above: QFormat | None = None) -> QuantScheme:
    return QuantScheme(linear, tier_above, tier_above)


SCHEMES: Mapping[str, QuantScheme] = MappingProxyType(
    {
        # A scale a row would cost 0.0027 nats per token on SmolLM2-135M, these cost 0.0014.
        "int8": _scheme(FORMATS["int8-g128"]),
        "int4": _scheme(FORMATS["int4"], FORMATS["int8-g128"]),
        "nf4": _scheme(FORMATS["nf4"], FORMATS["int8-g128"]),
        "fp8": _scheme(FORMATS["fp8"]),
        "w8a8": _scheme(FORMATS["w8a8"]),
        "Q8_0": _scheme(_GGML_8),
        "Q4_0": _scheme(_GGML_4, _GGML_8),
        "HQQ8": _scheme(_HQQ_8),
        "HQQ4": _scheme(_HQQ_4, _HQQ_8),
    }
)
"""Schemes by the names `--quant` takes, upper or lower case."""

_ALIASES = {"8": "int8", "4": "int4", "q8": "int8", "q4": "int4", "float8": "fp8"}
_FREE_GROUPS = ("int8", "int4", "nf4", "HQQ8", "HQQ4")


def scheme_name(name: str) -> str:
    """Returns a scheme's own name for any spelling of it, or `auto`.

    Raises:
      ValueError: there is no such scheme.
    """
    spelled = {known.lower(): known for known in (*SCHEMES, AUTO)}
    found = spelled.get(_ALIASES.get(name.lower(), name.lower()))
    if found is None:
        raise ValueError(f"quant {name!r} is unknown; choose one of {', '.join((*SCHEMES, AUTO))}")
    return found


def make_scheme(name: str, group_size: int | None = None) -> QuantScheme:
    """Returns the scheme of a name, its layers' matrices in groups of `group_size` if given.

    Raises:
      ValueError: there is no such scheme, or its groups are not free to choose.
    """
    name = scheme_name(name)
    if name == AUTO:
        raise ValueError(f"quant {AUTO!r} is a choice among schemes, not one of them")
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if name not in _FREE_GROUPS:
        size = scheme.linear.group_size
        raise ValueError(
            f"quant_group_size {group_size}: {name} always has "
            f"{'a scale for each row' if size is None else f'groups of {size}'}; leave it out, or "
            f"choose one of {', '.join(_FREE_GROUPS)}"
        )
    return replace(scheme, linear=replace(scheme.linear, group_size=group_size))


def choose_scheme(
    platform: str,
    free_bytes: int,
    weight_bytes: Mapping[str | None, int],
    unavailable: str | None = None,
) -> tuple[str | None, str]:
    """Returns the widest scheme that leaves room for a KV cache, and one line that says why.

    Args:
      platform: "cpu", "gpu" or "tpu".
      free_bytes: memory for the model, its KV cache and temporaries, all devices together.
      weight_bytes: what the weights take under each of AUTO_CANDIDATES.
      unavailable: why codes do not stay codes there, or None where they do.
    """
    if unavailable is not None:
        return None, f"not quantized: codes would save no memory on {platform}: {unavailable}"
    room = free_bytes * (1 - KV_SHARE)
    free = (
        f"{free_bytes / 1e9:.2f} GB are free on {platform}, {KV_SHARE:.0%} of it for the KV cache"
    )
    for name in AUTO_CANDIDATES:
        size = f"{weight_bytes[name] / 1e9:.2f} GB of weights"
        if weight_bytes[name] <= room:
            return name, f"{name or 'not quantized'}: {size}, the widest that fits ({free})"
    narrowest = AUTO_CANDIDATES[-1]
    return narrowest, f"{narrowest}: even its {size} do not fit, and it is the smallest ({free})"


def tensor_format(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> QFormat | None:
    """Returns what a checkpoint's tensor is quantized to on one device; None leaves it as it is.

    Args:
      name: its Hugging Face name: `…_proj.weight` are the layers' matrices.
      shape: its logical shape.
      scheme: of the model.

    Raises:
      ValueError: the format does not fit the matrix; names both.
    """
    fmt = _wanted_format(name, shape, scheme)
    if fmt is None:
        return None
    try:
        return fit_format(fmt, shape[1], 1, "cpu")
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from error


def weight_bytes(
    shapes: Mapping[str, tuple[int, ...]], scheme: QuantScheme | None, float_bytes: int
) -> int:
    """Returns the bytes of a model's weights under a scheme, before any padding.

    Args:
      shapes: of every tensor by its Hugging Face name.
      scheme: None for no quantization.
      float_bytes: bytes of a weight that is not quantized.
    """
    total = 0
    for name, shape in shapes.items():
        fmt = None if scheme is None else _wanted_format(name, shape, scheme)
        total += math.prod(shape) * float_bytes if fmt is None else _format_bytes(shape, fmt)
    return total


def _wanted_format(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> QFormat | None:
    if len(shape) != 2:
        return None
    match name.split(".")[-2:]:
        case ["lm_head", "weight"]:
            return scheme.head
        case ["embed_tokens", "weight"]:
            return scheme.embedding
        case [module, "weight"] if module.endswith("_proj"):
            return scheme.linear
    return None


def _format_bytes(shape: tuple[int, ...], fmt: QFormat) -> int:
    rows, columns = shape
    groups = rows * -(-columns // (fmt.group_size or columns))
    per_group = np.dtype(fmt.scale_dtype).itemsize * (1 + fmt.has_offset)
    return rows * columns * (4 if fmt.code.endswith("int4") else 8) // 8 + groups * per_group


def width_multiple(fmt: QFormat | None) -> int:
    """Returns what a padded width should be a multiple of, so that the format fits unchanged.

    It is the largest group and a TPU's lanes: rows of other widths are copied at every call there.
    """
    return 1 if fmt is None else max(GROUP_SIZES)


def fit_format(fmt: QFormat, in_features: int, devices: int, platform: str) -> QFormat:
    """Returns the format with the largest group, not above its own, that divides the width.

    Formats of ggml's keep their own group, or they would be others.

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
    largest = fmt.group_size or 0
    allowed = [size for size in GROUP_SIZES if size <= largest]
    if fmt.rounding == "ggml":
        allowed = [largest]
    sizes = [size for size in allowed if not width % size]
    if in_features % devices or width % chunk or (fmt.group_size is not None and not sizes):
        raise ValueError(
            f"a matrix with {in_features} input features, split over {devices} devices, cannot be "
            f"quantized to {fmt.code}: each part must be a multiple of "
            f"{max(chunk, min(allowed, default=1))}. Leave the quantization out"
        )
    return fmt if fmt.group_size is None else replace(fmt, group_size=sizes[-1])


def unpadded_format(fmt: QFormat | None, in_features: int) -> QFormat | None:
    """Returns the format as it fits a width before padding, so that groups are a checkpoint's own.

    A width that nothing fits keeps the format: padding is what makes it fit.
    """
    if fmt is None:
        return None
    try:
        return fit_format(fmt, in_features, 1, "cpu")
    except ValueError:
        return fmt


def quantize_on_host(weight: np.ndarray, fmt: QFormat) -> QTensor:
    """Rounds a host matrix `[O, I]` to a format, a few rows at a time, as `quantize` does it whole.

    Returns:
      numpy arrays in the layout of `LAYOUTS["cpu"]`.

    Raises:
      ValueError: the format does not fit the matrix.
    """
    num_rows, num_columns = weight.shape
    # A power of two near what a block may hold: matrices of one width share one program.
    at_once = 1 << (max(_BLOCK_WEIGHTS // num_columns, 1).bit_length() - 1)
    blocks = []
    for begin in range(0, num_rows, at_once):
        rows = np.zeros((at_once, num_columns), np.float32)
        part = weight[begin : begin + at_once]
        rows[: len(part)] = part
        block = jax.tree.map(np.asarray, _quantize_block(rows, fmt))
        blocks.append(dataclasses.replace(block, **_first_rows(block, len(part))))
    first = blocks[0]
    if len(blocks) == 1:
        return first
    joined = {
        name: np.concatenate([getattr(block, name) for block in blocks])
        for name in _first_rows(first, 0)
    }
    return dataclasses.replace(first, **joined)


def _first_rows(block: QTensor, count: int) -> dict[str, np.ndarray]:
    arrays = {"qvalue": block.qvalue, "scale": block.scale, "offset": block.offset}
    return {name: array[:count] for name, array in arrays.items() if array is not None}


@partial(jax.jit, static_argnums=1)
def _quantize_block(rows: jax.Array, fmt: QFormat) -> QTensor:
    return prepare(quantize(rows, fmt), "cpu")
