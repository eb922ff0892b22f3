"""Decoder layers as their formula reads, in float32: the contract for every other implementation.

Never tuned: it dequantizes each matrix whole and attends row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from kernels.decoder_layers.weights import BlockMatrix, LayerShape, LayerWeights
from kernels.paged_attention import AttentionMetadata, KVCache, KVStruct
from kernels.paged_attention import reference as attention
from kernels.quantized_matmul import QTensor, dequantize

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}

RotaryTable = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


def supports(
    x: Array | jax.ShapeDtypeStruct,
    kv: tuple[KVCache | KVStruct, ...],
    layers: tuple[LayerWeights, ...],
    shape: LayerShape,
) -> None:
    """Refuses other activations, permuted columns, and x that a matrix rounds to int8."""
    del x, kv
    if shape.activation not in _ACTIVATIONS:
        raise NotImplementedError(f"activation {shape.activation}: needs one of {[*_ACTIVATIONS]}")
    for layer in layers:
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            for piece in matrix.pieces:
                is_quantized = isinstance(piece, QTensor)
                if is_quantized and (piece.perm is not None or piece.activations != "float"):
                    raise NotImplementedError("a matrix multiplies x permuted or rounded to int8")


def run(
    x: Float[Array, "T D"],
    rotaries: Sequence[RotaryTable],
    kv: tuple[KVCache, ...],
    layers: tuple[LayerWeights, ...],
    metadata: AttentionMetadata,
    shape: LayerShape,
) -> tuple[Float[Array, "T D"], tuple[KVCache, ...]]:
    """Rounds nothing to `shape.product_dtype`; see `kernels.decoder_layers`."""
    hidden, written = x.astype(jnp.float32), []
    for layer, cache in zip(layers, kv, strict=True):
        normed = _normalize(hidden, layer.input_norm, shape.eps)
        added, cache = _attend(normed, rotaries[layer.rotary], cache, layer, metadata, shape)
        hidden += _normalize(added, layer.attention_norm, shape.eps)
        normed = _normalize(hidden, layer.mlp_input_norm, shape.eps)
        hidden += _normalize(_mlp(normed, layer, shape), layer.mlp_norm, shape.eps)
        written.append(cache)
    return hidden.astype(x.dtype), tuple(written)


def _attend(
    x: Float32[Array, "T D"],
    table: RotaryTable,
    cache: KVCache,
    layer: LayerWeights,
    metadata: AttentionMetadata,
    shape: LayerShape,
) -> tuple[Float32[Array, "T D"], KVCache]:
    qkv = _multiply(x, layer.qkv).reshape(len(x), shape.num_kv_heads, -1, shape.head_dim)
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
    q = _rotate(_normalize(q, layer.query_norm, shape.eps), table)
    k = _rotate(_normalize(k, layer.key_norm, shape.eps), table)
    new_kv = jnp.concatenate([k, v], axis=2)
    cache = attention.write(cache, new_kv, metadata.slot_mapping[layer.group])
    attended = attention.attend(
        q.reshape(len(x), shape.num_heads, shape.head_dim),
        cache,
        metadata,
        group=layer.group,
        scale=shape.scale,
        window=layer.window,
        soft_cap=shape.soft_cap,
    )
    return _multiply(attended.reshape(len(x), -1), layer.out), cache


def _mlp(x: Float32[Array, "T D"], layer: LayerWeights, shape: LayerShape) -> Float32[Array, "T D"]:
    gates, ups = jnp.split(_multiply(x, layer.gate_up), 2, axis=1)
    return _multiply(_ACTIVATIONS[shape.activation](gates) * ups, layer.down)


def _multiply(x: Float32[Array, "T I"], matrix: BlockMatrix) -> Float32[Array, "T O"]:
    """Returns the product with all pieces, put together block by block."""
    products = [
        _product(x, piece).reshape(len(x), -1, rows)
        for piece, rows in zip(matrix.pieces, matrix.rows, strict=True)
    ]
    product = jnp.concatenate(products, axis=2).reshape(len(x), -1)
    return product if matrix.bias is None else product + matrix.bias.astype(jnp.float32)[None]


def _product(x: Float32[Array, "T I"], piece: QTensor | Array) -> Float32[Array, "T O"]:
    weight = dequantize(piece) if isinstance(piece, QTensor) else piece.astype(jnp.float32)
    return jnp.einsum("TI,OI->TO", x, weight, precision="highest")


def _normalize(
    x: Float32[Array, "*rows D"], weight: Float[Array, " D"] | None, eps: float
) -> Float32[Array, "*rows D"]:
    if weight is None:
        return x
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    factor = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return x * jax.lax.rsqrt(variance + eps) * factor


def _rotate(x: Float32[Array, "T K G H"], table: RotaryTable) -> Float32[Array, "T K G H"]:
    cos, sin = (angles[:, None, None] for angles in table)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
