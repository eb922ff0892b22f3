"""All decoder layers of a step in one call, where one call is faster than many.

On two CPU cores a step of a small model is hundreds of operations of microseconds each: handing
each to XLA's threads takes longer than doing it. Implementations: `cpu` (C++), and `reference`, the
contract that tests hold others to: it is never chosen, because a model's own modules do the same
faster. To add one, write its module with `supports(x, kv, layers, shape)` and `run(...)` and name
it in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array
from jaxtyping import Float, Float32

from kernels import dispatch
from kernels.decoder_layers.weights import BlockMatrix, LayerShape, LayerWeights
from kernels.paged_attention import AttentionMetadata, KVCache, KVStruct

__all__ = ["IMPLEMENTATIONS", "BlockMatrix", "LayerShape", "LayerWeights", "choose", "run"]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "gpu": (), "tpu": ()}

RotaryTables = Sequence[tuple[Float32[Array, "T half"], Float32[Array, "T half"]]]
"""Cosines and sines of every token's angles, for each kind of rotation."""


def run(
    x: Float[Array, "T D"],
    rotaries: RotaryTables,
    kv: tuple[KVCache, ...],
    layers: tuple[LayerWeights, ...],
    metadata: AttentionMetadata,
    shape: LayerShape,
    *,
    platform: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "T D"], tuple[KVCache, ...]]:
    """Returns the hidden states after the last layer, and the caches with this step written.

    Rows of x that are no token of the step come back finite if they were, else undefined.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call; names each one's reason.
    """
    choice = choose(x, kv, layers, shape, platform=platform, implementation=implementation)
    return choice.module.run(x, rotaries, kv, layers, metadata, shape)


def choose(
    x: Array | jax.ShapeDtypeStruct,
    kv: tuple[KVCache | KVStruct, ...],
    layers: tuple[LayerWeights, ...],
    shape: LayerShape,
    *,
    platform: str,
    implementation: str | None = None,
) -> dispatch.Choice:
    """Returns what `run` runs for such arrays (shapes are enough), with each refusal's reason.

    Raises:
      ValueError: `platform` or `implementation` is unknown.
      NotImplementedError: no implementation supports the call.
    """
    return dispatch.choose(
        __name__,
        IMPLEMENTATIONS,
        platform=platform,
        requested=implementation,
        supports=lambda module: module.supports(x, kv, layers, shape),
    )
