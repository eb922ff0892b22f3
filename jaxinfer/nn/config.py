"""The sizes and choices a decoder is built from. Families fill it from their `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxinfer.nn.rotary import RotaryConfig


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; no field has a default, so none can be forgotten.

    Attributes:
      activation: of the gated MLP, a key of `nn.mlp.ACTIVATIONS`.
      qkv_bias, out_bias, mlp_bias: which projections add a bias.
      qk_norm: an RMS-norm over head_dim of each query and key before the rotation.
      attention_scale: factor of the scores; attention_soft_cap: their tanh bound, None for none.
      windows: per layer, how many keys a query sees, itself included; None for all.
      rotaries: per layer, the rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    attention_soft_cap: float | None
    windows: tuple[int | None, ...]
    rotaries: tuple[RotaryConfig, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same keys, so that they share page ids."""

    window: int | None
    layers: tuple[int, ...]


def kv_groups(config: DecoderConfig) -> tuple[KVGroup, ...]:
    """Returns the layers grouped by attention window, in order of first use."""
    return tuple(
        KVGroup(window, tuple(i for i, other in enumerate(config.windows) if other == window))
        for window in dict.fromkeys(config.windows)
    )


def num_cache_kv_heads(config: DecoderConfig, tensor_parallel: int) -> int:
    """Returns K': KV heads in the cache, repeated so that every device holds equally many.

    Raises:
      ValueError: `tensor_parallel` does not divide the query heads.
    """
    if config.num_heads % tensor_parallel:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise ValueError(
            f"tensor_parallel={tensor_parallel} does not divide num_heads={config.num_heads}: "
            f"use one of {divisors}"
        )
    return math.lcm(config.num_kv_heads, tensor_parallel)
