"""From a float matrix to a QTensor: how codes, scales and offsets are chosen.

`absmax` takes each group's range as it is, `ggml` gives the bits of ggml's Q8_0 and Q4_0, `hqq` is
half-quadratic quantization (Badri and Shaji 2023), which needs no calibration data either.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from kernels.quantized_matmul.format import Code, QFormat, QTensor, divide_groups, encode

_Rounded: TypeAlias = tuple[Array, Array, Array | None]
"""Codes `[O, groups, group_size]` as float numbers; scale and offset `[O, groups]`."""

_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_HQQ_CODES: dict[Code, tuple[float, float]] = {"int8": (-127.0, 127.0), "uint4": (0.0, 15.0)}
_HQQ_NORM = 0.7
_HQQ_BETA, _HQQ_KAPPA = 10.0, 1.01
_HQQ_STEPS = 20


def quantize(
    weight: Float[Array, "O I"], fmt: QFormat, scale_dtype: jax.typing.DTypeLike | None = None
) -> QTensor:
    """Rounds a matrix to a format, each group by itself, in the canonical layout.

    Args:
      weight: any float type; rounded from its float32 values.
      fmt: says how as well: `fmt.rounding`.
      scale_dtype: of scales and offsets; None means `fmt.scale_dtype`.

    Raises:
      ValueError: the group size does not divide I, or 4-bit codes meet an odd I.
    """
    num_rows, num_columns = weight.shape
    group_size = fmt.group_size or num_columns
    if num_columns % group_size or (fmt.code.endswith("int4") and num_columns % 2):
        raise ValueError(
            f"a matrix {weight.shape} cannot be quantized to {fmt.code} in groups of {group_size}: "
            f"I must be a multiple of the group size, and even for 4-bit codes"
        )
    groups = weight.astype(jnp.float32).reshape(num_rows, -1, group_size)
    round_groups = {"absmax": _by_range, "ggml": _like_ggml, "hqq": _half_quadratic}[fmt.rounding]
    codes, scale, offset = round_groups(groups, fmt, scale_dtype or fmt.scale_dtype)
    return QTensor(
        encode(codes.reshape(num_rows, num_columns), fmt.code),
        scale,
        offset,
        None if fmt.codebook is None else jnp.asarray(fmt.codebook, jnp.float32),
        code=fmt.code,
        group_size=group_size,
        activations=fmt.activations,
    )


def _by_range(groups: Array, fmt: QFormat, scale_dtype: jax.typing.DTypeLike) -> _Rounded:
    """Rounds by each group's range.

    Symmetric codes use `scale = max|w| / largest code`. With an offset, `uint4` codes count 15
    steps from the group's minimum, `int8` codes -127..127 the 254 steps around its middle.
    """
    if fmt.has_offset and fmt.code == "int8":
        offset = ((groups.min(-1) + groups.max(-1)) / 2).astype(scale_dtype)
        centred = groups - offset.astype(jnp.float32)[..., None]
        scale = (jnp.abs(centred).max(-1) / 127.0).astype(scale_dtype)
        return jnp.clip(jnp.round(divide_groups(centred, scale)), -127, 127), scale, offset
    if fmt.has_offset:
        offset = groups.min(-1).astype(scale_dtype)
        spread = groups.max(-1) - offset.astype(jnp.float32)
        scale = (spread / 15.0).astype(scale_dtype)
        scaled = divide_groups(groups - offset.astype(jnp.float32)[..., None], scale)
        return jnp.clip(jnp.round(scaled), 0, 15), scale, offset
    if fmt.codebook is not None:
        scale = (jnp.abs(groups).max(-1) / max(map(abs, fmt.codebook))).astype(scale_dtype)
        return _nearest(divide_groups(groups, scale), fmt.codebook), scale, None
    largest = _LARGEST[fmt.code]
    scale = (jnp.abs(groups).max(-1) / largest).astype(scale_dtype)
    codes = jnp.clip(divide_groups(groups, scale), -largest, largest)
    return codes if fmt.code == "fp8" else jnp.round(codes), scale, None


def _like_ggml(groups: Array, fmt: QFormat, scale_dtype: jax.typing.DTypeLike) -> _Rounded:
    """Rounds as ggml's `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` do, to the same bits.

    Codes come from the float32 scale; what is stored is that scale rounded. The barrier keeps XLA
    from dividing by a constant through its reciprocal; it fuses a product with the sum after it
    into one rounding unless something stands between, here `abs` and `clip`.
    """
    if fmt.code == "int8":
        size = jnp.abs(groups).max(-1)
        scale = size / jax.lax.optimization_barrier(jnp.full_like(size, 127))
    else:
        largest_idx = jnp.abs(groups).argmax(-1, keepdims=True)
        scale = jnp.take_along_axis(groups, largest_idx, -1)[..., 0] / -8.0
    inverse = jnp.where(scale == 0, 0.0, 1.0 / jnp.where(scale == 0, 1.0, scale))
    scaled = groups * inverse[..., None]
    if fmt.code == "int8":
        size = jnp.abs(scaled)
        whole = jnp.floor(size)
        codes = jnp.sign(scaled) * jnp.where(size - whole >= 0.5, whole + 1, whole)
    else:
        codes = jnp.minimum(jnp.trunc(jnp.clip(scaled, -8.0, 8.0) + 8.5), 15.0) - 8.0
    return codes, scale.astype(scale_dtype), None


def _half_quadratic(groups: Array, fmt: QFormat, scale_dtype: jax.typing.DTypeLike) -> _Rounded:
    """Rounds by half-quadratic quantization: the range as it is, the zero point optimized.

    It alternates between the error that an l_p norm with p < 1 would leave as outliers and the zero
    point that fits the rest best. Errors are counted in steps of each group, so that beta means the
    same for every matrix; of all zero points tried a group keeps the one of least mean error.
    """
    low, high = _HQQ_CODES[fmt.code]
    smallest = groups.min(-1)
    scale = ((groups.max(-1) - smallest) / (high - low)).astype(scale_dtype)
    steps = scale.astype(jnp.float32)
    weights = divide_groups(groups, scale)
    zero = low - divide_groups(smallest[..., None], scale)[..., 0]

    def rounded(zero: Array) -> Array:
        return jnp.clip(jnp.round(weights + zero[..., None]), low, high)

    def improve(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        zero, best_zero, least = state
        codes = rounded(zero)
        error = weights - (codes - zero[..., None])
        size = jnp.abs(error)
        mean = _mean(size)
        best_zero = jnp.where(mean < least, zero, best_zero)
        beta = _HQQ_BETA * jnp.float32(_HQQ_KAPPA) ** step.astype(jnp.float32)
        # size ** (p - 1) / beta; XLA's power, which takes any sign, costs as much as all the rest.
        threshold = jnp.exp((_HQQ_NORM - 1.0) * jnp.log(jnp.maximum(size, 1e-6))) / beta
        outliers = jnp.sign(error) * jnp.maximum(size - threshold, 0.0)
        zero = _mean(codes - (weights - outliers))
        return zero, best_zero, jnp.minimum(mean, least)

    start = (zero, zero, jnp.full_like(zero, jnp.inf))
    _, zero, _ = jax.lax.fori_loop(0, _HQQ_STEPS, improve, start)
    # Where all weights are equal the scale is 0 and the offset is all there is.
    offset = jnp.where(steps == 0, smallest, -zero * steps).astype(scale_dtype)
    stored_zero = -divide_groups(offset.astype(jnp.float32)[..., None], scale)[..., 0]
    return rounded(stored_zero), scale, offset


def _mean(values: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the mean over the last axis by halves: in one order, whatever the other axes are."""
    size = values.shape[-1]
    while values.shape[-1] > 1 and values.shape[-1] % 2 == 0:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.sum(-1) / size


def _nearest(values: Float32[Array, "..."], codebook: tuple[float, ...]) -> Float32[Array, "..."]:
    """Returns the index of the nearest codebook value; the codebook may be in any order."""
    order = np.argsort(codebook, kind="stable")
    ordered = np.asarray(codebook, np.float32)[order]
    middles = jnp.asarray((ordered[1:] + ordered[:-1]) / 2)
    index = jnp.searchsorted(middles, values, method="compare_all")
    return jnp.asarray(order.astype(np.float32))[index]
