"""Decoder layers on CPUs by C++ behind `jax.ffi`: one call for all, whose threads never part.

The sources beside this file are built by `kernels.native_build` into the library of all C++
kernels. Matrices and attention are those of `quantized_matmul.cpu` and `paged_attention.cpu`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from kernels import native
from kernels.decoder_layers.weights import BlockMatrix, LayerShape, LayerWeights
from kernels.paged_attention import AttentionMetadata, KVCache, KVStruct, QuantizedKV
from kernels.paged_attention import cpu as attention
from kernels.quantized_matmul import QTensor
from kernels.quantized_matmul import cpu as matmul

__all__ = ["is_available", "run", "supports", "unavailable"]

# The version is that of the handlers in cpu.cc.
_TARGET = "jaxinfer_decoder_layers_v3"
# In the order of cpu.cc.
_CODES = ("int8", "fp8", "int4", "uint4", "int5", "uint5")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_NONE = np.zeros((0,), np.float32)


def is_available() -> bool:
    """Whether the library is there and this version of jax takes it."""
    return unavailable() is None


def unavailable() -> str | None:
    """Returns why the library cannot be used, or None."""
    return native.unavailable(_TARGET)


def supports(
    x: Array | jax.ShapeDtypeStruct,
    kv: tuple[KVCache | KVStruct, ...],
    layers: tuple[LayerWeights, ...],
    shape: LayerShape,
) -> None:
    """Refuses without the library, on int8 caches, and on matrices that are not plain codes."""
    if reason := unavailable():
        raise NotImplementedError(reason)
    if x.dtype != jnp.float32:
        raise NotImplementedError(f"x is {x.dtype}: needs float32 between operations")
    if shape.activation not in _ACTIVATIONS:
        raise NotImplementedError(f"activation {shape.activation}: needs one of {_ACTIVATIONS}")
    heads = jax.ShapeDtypeStruct((x.shape[0], shape.num_heads, shape.head_dim), jnp.float32)
    for cache in kv:
        if isinstance(cache, QuantizedKV):
            raise NotImplementedError("the cache is int8: its keys are mixed before they are kept")
        attention.supports(heads, cache)
    for layer in layers:
        for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
            for piece in matrix.pieces:
                _check_piece(piece, x.shape[0])


def _check_piece(piece: Any, num_tokens: int) -> None:
    if not isinstance(piece, QTensor):
        raise NotImplementedError("a matrix is not quantized")
    if piece.perm is not None:
        raise NotImplementedError("a matrix has permuted columns")
    if piece.activations != "float":
        raise NotImplementedError("a matrix is multiplied by rounded activations")
    matmul.supports(jax.ShapeDtypeStruct((num_tokens, piece.shape[1]), jnp.float32), piece)


def run(
    x: Float[Array, "T D"],
    rotaries: Any,
    kv: tuple[KVCache, ...],
    layers: tuple[LayerWeights, ...],
    metadata: AttentionMetadata,
    shape: LayerShape,
) -> tuple[Float[Array, "T D"], tuple[KVCache, ...]]:
    """Works in float32; a token's bits depend on no other token; see `kernels.decoder_layers`."""
    operands: list[Any] = [
        x.astype(jnp.float32),
        metadata.num_seqs,
        metadata.kv_lens,
        metadata.cu_q_lens,
        metadata.slot_mapping,
        metadata.page_table,
    ]
    for table in rotaries:
        operands += table
    first_cache = len(operands)
    operands += kv
    layout: list[int] = []
    for layer in layers:
        _add_layer(layer, operands, layout)
    intermediate = layers[0].down.shape[1]
    num_tokens, hidden_size = x.shape
    workspace = _num_floats(shape, num_tokens, hidden_size, intermediate)
    call = jax.ffi.ffi_call(
        native.handler(_TARGET),
        (
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct((workspace,), jnp.float32),
            *(jax.typeof(cache) for cache in kv),
        ),
        input_output_aliases={0: 0} | {first_cache + i: 2 + i for i in range(len(kv))},
    )
    hidden, _, *written = call(
        *operands,
        num_layers=np.int64(len(layers)),
        num_rotaries=np.int64(len(rotaries)),
        num_heads=np.int64(shape.num_heads),
        num_kv_heads=np.int64(shape.num_kv_heads),
        head_dim=np.int64(shape.head_dim),
        intermediate=np.int64(intermediate),
        activation=np.int64(_ACTIVATIONS.index(shape.activation)),
        eps=np.float32(shape.eps),
        scale=np.float32(shape.scale),
        soft_cap=np.float32(shape.soft_cap or 0.0),
        rounds=np.bool_(shape.product_dtype == "bfloat16"),
        is_decode=np.bool_(metadata.is_decode),
        layout=np.array(layout, np.int64),
    )
    return hidden.astype(x.dtype), tuple(written)


def _num_floats(shape: LayerShape, num_tokens: int, hidden: int, intermediate: int) -> int:
    """As `Workspace` in cpu_step.h counts them."""
    heads, kv = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    products = (heads + kv) + heads + kv + hidden + 2 * intermediate
    tile, chunk, chunk_floats = 16, 32, 19  # tokens, columns, and floats of a rounded chunk
    packed = max(num_tokens, 8) if num_tokens <= tile else -(-num_tokens // tile) * tile
    chunks = sum(-(-size // chunk) for size in (hidden, heads, intermediate))
    floats = num_tokens * (products + hidden + heads + intermediate)
    return floats + packed * chunks * chunk_floats


def _add_layer(layer: LayerWeights, operands: list[Any], layout: list[int]) -> None:
    """Appends a layer's arrays and numbers in the order in which cpu.cc reads them."""

    def vector(value: Any) -> None:
        operands.append(_NONE if value is None else value.astype(jnp.float32))

    def matrix(value: BlockMatrix) -> None:
        layout.append(len(value.pieces))
        for piece, rows in zip(value.pieces, value.rows, strict=True):
            layout.extend((rows, _CODES.index(matmul.stored_code(piece)), piece.layout.row_block))
            operands.extend((piece.qvalue, piece.scale))
            operands.extend(_NONE if a is None else a for a in (piece.offset, piece.codebook))
        vector(value.bias)

    layout.extend((layer.rotary, layer.group, layer.window or 0))
    vector(layer.input_norm)
    matrix(layer.qkv)
    vector(layer.query_norm)
    vector(layer.key_norm)
    matrix(layer.out)
    vector(layer.attention_norm)
    vector(layer.mlp_input_norm)
    matrix(layer.gate_up)
    matrix(layer.down)
    vector(layer.mlp_norm)
