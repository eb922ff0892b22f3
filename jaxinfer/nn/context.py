"""What a model needs to know about where and how it runs; nothing about its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.quantization import QuantScheme
from kernels.quantized_matmul import QFormat


@dataclass(frozen=True)
class ModelContext:
    """Placement and numerics of one model instance, fixed for its lifetime.

    Attributes:
      mesh: devices with axes ("data", "tensor"); one chip is a mesh of one.
      platform: "cpu", "gpu" or "tpu": chooses kernels.
      dtype: of activations between operations; every accumulation is float32.
      weight_dtype: of matrices and embeddings; norm weights are always float32.
      precision: of matrix products; "highest" for `--exact`, None for the platform's default.
      attention, matmul: names of the implementations of attention and of quantized matmul to
        insist on, or None to choose.
      quant: formats that matrices are rounded to when they are filled; None leaves them as the
        checkpoint has them.
      keeps_quantized: quantized matrices of a checkpoint stay quantized; else they become float.
      stored_group_size: largest group of the checkpoint's quantized matrices: padded widths are a
        multiple of it for every device.
    """

    mesh: Mesh
    platform: str
    dtype: np.dtype
    weight_dtype: np.dtype
    precision: Literal["highest"] | None = None
    attention: str | None = None
    matmul: str | None = None
    quant: QuantScheme | None = None
    keeps_quantized: bool = True
    stored_group_size: int = 1

    @property
    def tensor_parallel(self) -> int:
        """Devices that share each layer's weights."""
        return self.mesh.shape["tensor"]

    @property
    def linear_format(self) -> QFormat | None:
        """Format of the layers' matrices."""
        return None if self.quant is None else self.quant.linear

    @property
    def embedding_format(self) -> QFormat | None:
        """Format of the embedding, and of a head tied to it."""
        return None if self.quant is None else self.quant.embedding

    @property
    def head_format(self) -> QFormat | None:
        """Format of a head that is not tied to the embedding."""
        return None if self.quant is None else self.quant.head

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding that splits dimension i over mesh axis `axes[i]`."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pins the sharding of an intermediate value; no axes at all means replicated."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*axes))
