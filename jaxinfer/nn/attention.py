"""Grouped-query self-attention over the paged KV cache."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxinfer.nn.config import DecoderConfig, kv_groups, num_cache_kv_heads
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.hadamard import mix
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.norm import RMSNorm
from jaxinfer.nn.rotary import RotaryTable, rotate
from jaxinfer.nn.weights import Part, RowLayout, plain_layout
from kernels.paged_attention import (
    AttentionMetadata,
    KVCache,
    QuantizedKV,
    attend,
    kv_partition,
    write,
)

_HEADS = PartitionSpec(None, "tensor")


class Attention(nnx.Module):
    """Projections, rotation, the cache write, attention, and the output projection.

    Rows of the fused projection are `[K', G' queries then key then value, H]`: KV head after KV
    head, each repeated K'/K times, so that they split over devices and need no shuffle.
    """

    def __init__(self, config: DecoderConfig, context: ModelContext, layer_idx: int) -> None:
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        blocks = num_cache_kv_heads(config, context.tensor_parallel)
        kv_part = Part(kv_heads * head_dim, repeat=blocks // kv_heads)
        parts = (Part(heads * head_dim, slots=heads // blocks), kv_part, kv_part)
        make = partial(Linear, context=context, fmt=context.linear_format)
        self.qkv = make(
            config.hidden_size,
            RowLayout(blocks, head_dim, parts),
            sharding="column",
            bias=config.qkv_bias,
        )
        out = plain_layout(config.hidden_size)
        self.out = make(heads * head_dim, out, sharding="row", bias=config.out_bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.context = context
        self.num_heads, self.num_kv_heads, self.head_dim = heads, blocks, head_dim
        self.scale, self.soft_cap = config.attention_scale, config.attention_soft_cap
        self.window = config.windows[layer_idx]
        self.group = next(i for i, g in enumerate(kv_groups(config)) if layer_idx in g.layers)

    def __call__(
        self,
        x: Float[Array, "T D"],
        table: RotaryTable,
        kv: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns the output without the residual, and the cache with this step's keys in it."""
        num_tokens = x.shape[0]
        qkv = self.qkv(x).reshape(num_tokens, self.num_kv_heads, -1, self.head_dim)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]  # [T, K', G' or 1, H]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, table).reshape(num_tokens, -1, self.head_dim)
        new_kv = jnp.concatenate([rotate(k, table), v], axis=2)
        output, kv = self._write_and_attend(q, new_kv, kv, metadata)
        return self.out(output.reshape(num_tokens, -1)), kv

    def _write_and_attend(
        self,
        q: Float[Array, "T N H"],
        new_kv: Float[Array, "T K 2 H"],
        kv: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T N H"], KVCache]:
        """Runs both kernels on each device's own heads."""
        pages = kv_partition(kv, "tensor")
        implementation, platform = self.context.attention, self.context.platform

        @partial(
            jax.shard_map,
            mesh=self.context.mesh,
            in_specs=(_HEADS, _HEADS, pages, PartitionSpec()),
            out_specs=(_HEADS, pages),
            check_vma=False,  # kernels need not annotate what varies over the mesh
        )
        def run(
            q: jax.Array, new_kv: jax.Array, kv: KVCache, metadata: AttentionMetadata
        ) -> tuple[jax.Array, KVCache]:
            if isinstance(kv, QuantizedKV):  # one scale for a key: no channel may dominate it
                q = mix(q)
                new_kv = jnp.stack([mix(new_kv[:, :, 0]), new_kv[:, :, 1]], axis=2)
            kv = write(
                kv,
                new_kv,
                metadata.slot_mapping[self.group],
                platform=platform,
                implementation=implementation,
            )
            output = attend(
                q,
                kv,
                metadata,
                group=self.group,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                platform=platform,
                implementation=implementation,
            )
            return output, kv

        return run(q, new_kv, kv, metadata)
