"""All layers of a step in one native call, on platforms and models where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.nn.attention import Attention
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.matrix import MixedMatrix
from jaxinfer.nn.mlp import MLP
from jaxinfer.nn.norm import RMSNorm
from kernels import decoder_layers
from kernels.decoder_layers import BlockMatrix, LayerShape, LayerWeights
from kernels.dispatch import Choice
from kernels.paged_attention import KVCache, KVStruct


def choose_fused(
    config: DecoderConfig,
    context: ModelContext,
    x: jax.Array | jax.ShapeDtypeStruct,
    kv: Sequence[KVCache | KVStruct],
    layers: Sequence[LayerWeights],
) -> Choice:
    """Returns what runs all layers at once.

    Raises:
      NotImplementedError: nothing does; says why.
    """
    if context.mesh.size > 1:
        raise NotImplementedError("layers are split over devices")
    for flag, name in (("attention", context.attention), ("matmul", context.matmul)):
        if name not in (None, *decoder_layers.IMPLEMENTATIONS[context.platform]):
            raise NotImplementedError(f"--{flag} {name}")
    shape = layer_shape(config, context)
    return decoder_layers.choose(x, tuple(kv), tuple(layers), shape, platform=context.platform)


def layer_shape(config: DecoderConfig, context: ModelContext) -> LayerShape:
    """Returns what all layers of a model have in common."""
    return LayerShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        activation=config.activation,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        product_dtype="bfloat16" if context.weight_dtype == jnp.bfloat16 else "float32",
    )


def layer_weights(
    attention: Attention,
    mlp: MLP,
    rotary: int,
    *,
    input_norm: RMSNorm,
    mlp_input_norm: RMSNorm,
    attention_norm: RMSNorm | None = None,
    mlp_norm: RMSNorm | None = None,
) -> LayerWeights:
    """Returns the arrays of a layer made of these parts."""
    block_heads = attention.num_heads // attention.num_kv_heads + 2
    return LayerWeights(
        input_norm=_vector(input_norm),
        qkv=_matrix(attention.qkv, block_heads * attention.head_dim),
        query_norm=_vector(attention.q_norm),
        key_norm=_vector(attention.k_norm),
        out=_matrix(attention.out),
        attention_norm=_vector(attention_norm),
        mlp_input_norm=_vector(mlp_input_norm),
        gate_up=_matrix(mlp.gate_up),
        down=_matrix(mlp.down),
        mlp_norm=_vector(mlp_norm),
        rotary=rotary,
        group=attention.group,
        window=attention.window,
    )


def _vector(norm: RMSNorm | None) -> Any:
    return None if norm is None else norm.weight.get_value()


def _matrix(linear: Linear, block_rows: int | None = None) -> BlockMatrix:
    """Returns a weight as pieces; without `block_rows` it is one block."""
    value = linear.weight.get_value()
    bias = None if linear.bias is None else linear.bias.get_value()
    if isinstance(value, MixedMatrix):
        return BlockMatrix(value.pieces, value.rows, bias)
    return BlockMatrix((value,), (block_rows or value.shape[0],), bias)
