"""Rotary position embeddings: frequencies, their long-context scalings, and the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

RotaryTable = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]
"""Cosines and sines of every token's angles."""


@runtime_checkable
class RotaryScaling(Protocol):
    """A change of the frequencies that stretches the context; frozen and hashable."""

    def scale(self, frequencies: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """Returns the scaled frequencies, radians per token."""


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`."""

    factor: float

    def scale(self, frequencies: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """Returns `frequencies / factor`."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, those between interpolated.

    A wavelength is long above `original_context / low_freq_factor` tokens and short below
    `original_context / high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def scale(self, frequencies: Float[np.ndarray, " half"]) -> Float[np.ndarray, " half"]:
        """Returns `f·(s + (1 - s)/factor)` with s rising from 0 (long) to 1 (short)."""
        turns = self.original_context * frequencies / (2 * np.pi)
        band = self.high_freq_factor - self.low_freq_factor
        share = np.clip((turns - self.low_freq_factor) / band, 0.0, 1.0)
        return frequencies * (share + (1.0 - share) / self.factor)


@dataclass(frozen=True)
class RotaryConfig:
    """`angle(position, i) = position · scaling(theta^(-2i / head_dim))` for i < head_dim / 2."""

    theta: float
    head_dim: int
    scaling: RotaryScaling | None

    def table(self, positions: Int32[Array, " T"]) -> RotaryTable:
        """Returns cosines and sines in float32: bfloat16 angles would merge positions past 256."""
        frequencies = self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        angles = positions.astype(jnp.float32)[:, None] * frequencies.astype(np.float32)[None, :]
        return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "T *heads H"], table: RotaryTable) -> Float[Array, "T *heads H"]:
    """Rotates each pair (x[i], x[i + H/2]) by its token's angle, in float32."""
    heads = range(1, x.ndim - 1)
    cos, sin = (jnp.expand_dims(part, heads) for part in table)
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return rotated.astype(x.dtype)
