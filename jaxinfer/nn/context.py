"""What a model needs to know about where and how it runs; nothing about its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class ModelContext:
    """Placement and numerics of one model instance, fixed for its lifetime.

    Attributes:
      mesh: devices with axes ("data", "tensor"); one chip is a mesh of one.
      platform: "cpu", "gpu" or "tpu": chooses kernels.
      dtype: of activations between operations; every accumulation is float32.
      weight_dtype: of matrices and embeddings; norm weights are always float32.
      precision: of matrix products; "highest" for `--exact`, None for the platform's default.
      attention: name of the attention implementation to insist on, or None to choose.
    """

    mesh: Mesh
    platform: str
    dtype: np.dtype
    weight_dtype: np.dtype
    precision: Literal["highest"] | None = None
    attention: str | None = None

    @property
    def tensor_parallel(self) -> int:
        """Devices that share each layer's weights."""
        return self.mesh.shape["tensor"]

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding that splits dimension i over mesh axis `axes[i]`."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins the sharding of an intermediate value; no axes at all means replicated."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))
