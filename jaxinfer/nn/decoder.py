"""The decoder skeleton of every family: embed, layers, final norm, head."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.nn.attention import Attention
from jaxinfer.nn.config import DecoderConfig, num_cache_kv_heads
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.embedding import Embedding
from jaxinfer.nn.fused_layers import choose_fused, layer_shape, layer_weights
from jaxinfer.nn.linear import Linear
from jaxinfer.nn.mlp import MLP
from jaxinfer.nn.norm import RMSNorm
from jaxinfer.nn.rotary import RotaryTable
from jaxinfer.nn.weights import plain_layout
from kernels.decoder_layers import LayerWeights
from kernels.dispatch import Choice
from kernels.paged_attention import AttentionMetadata, KVCache, KVStruct


class LayerFactory(Protocol):
    """What a family's layer class looks like; the layers it makes are called as `DecoderLayer`."""

    def __call__(self, config: DecoderConfig, context: ModelContext, layer_idx: int) -> nnx.Module:
        """Returns one layer."""


class DecoderLayer(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, config: DecoderConfig, context: ModelContext, layer_idx: int) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, context, layer_idx)
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, context)

    def __call__(
        self,
        x: Float[Array, "T D"],
        table: RotaryTable,
        kv: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns the hidden states after this layer, and its cache."""
        attended, kv = self.attention(self.input_norm(x), table, kv, metadata)
        x = x + attended
        return x + self.mlp(self.post_attention_norm(x)), kv

    def weights(self, rotary: int) -> LayerWeights:
        """Returns its arrays, for a call that runs all layers."""
        return layer_weights(
            self.attention,
            self.mlp,
            rotary,
            input_norm=self.input_norm,
            mlp_input_norm=self.post_attention_norm,
        )


class CausalLM(nnx.Module):
    """Token ids to next-token logits through a paged KV cache.

    Families set `layer` and override `embed` or `logits` where they differ.

    Attributes:
      num_cache_kv_heads: KV heads of each layer's cache, repeated for tensor parallelism.

    Raises:
      ValueError: the mesh's tensor axis does not divide the query heads.
    """

    layer: ClassVar[LayerFactory] = DecoderLayer

    def __init__(self, config: DecoderConfig, context: ModelContext) -> None:
        self.config = config
        self.context = context
        self.num_cache_kv_heads = num_cache_kv_heads(config, context.tensor_parallel)
        vocab = plain_layout(config.vocab_size, multiple_of=context.tensor_parallel)
        self.embedding = Embedding(config.hidden_size, vocab, context, context.embedding_format)
        self.layers = nnx.List(
            [type(self).layer(config, context, i) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        tied = self.embedding.weight if config.tie_word_embeddings else None
        self.head = Linear(
            config.hidden_size,
            vocab,
            context,
            sharding="column",
            weight=tied,
            fmt=context.head_format,
        )

    def __call__(
        self,
        token_ids: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        kv: tuple[KVCache, ...],
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], tuple[KVCache, ...]]:
        """Returns hidden states after the final norm, and the caches with this step written."""
        rotaries = self.config.rotaries
        tables = {rotary: rotary.table(positions) for rotary in dict.fromkeys(rotaries)}
        x = self.embed(token_ids)
        try:
            fused, weights = self.choose_fused(x, kv)
        except NotImplementedError:
            pass
        else:
            shape = layer_shape(self.config, self.context)
            x, kv = fused.module.run(x, [*tables.values()], kv, weights, metadata, shape)
            return self.norm(x), kv
        new_kv = []
        for layer, rotary, pages in zip(self.layers, rotaries, kv, strict=True):
            graphdef, state = nnx.split(layer)
            x, pages = _run_layer(graphdef, state, x, tables[rotary], pages, metadata)
            new_kv.append(pages)
        return self.norm(x), tuple(new_kv)

    def choose_fused(
        self,
        x: Float[Array, "T D"] | jax.ShapeDtypeStruct,
        kv: tuple[KVCache | KVStruct, ...],
    ) -> tuple[Choice, tuple[LayerWeights, ...]]:
        """Returns what runs all layers in one call, and their arrays.

        Raises:
          NotImplementedError: nothing does; says why.
        """
        rotaries = [*dict.fromkeys(self.config.rotaries)]
        weights = tuple(
            layer.weights(rotaries.index(rotary))
            for layer, rotary in zip(self.layers, self.config.rotaries, strict=True)
        )
        return choose_fused(self.config, self.context, x, kv, weights), weights

    def embed(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Returns what enters the first layer."""
        return self.embedding(token_ids)

    def logits(
        self, hidden: Float[Array, "R D"], num_rows: Int32[Array, ""] | None = None
    ) -> Float32[Array, "R V"]:
        """Returns float32 logits of the vocabulary, on every device, for some hidden rows.

        Only the first `num_rows` are meant, where given: others are unspecified.
        """
        logits = self.head(hidden, out_dtype=jnp.float32, num_tokens=num_rows)
        return self.context.constrain(logits[:, : self.config.vocab_size])


@partial(jax.jit, static_argnums=0)
def _run_layer(graphdef: Any, state: Any, *inputs: Any) -> tuple[jax.Array, KVCache]:
    """Calls a layer inside its own jit: layers with equal graphdefs are traced and lowered once."""
    return nnx.merge(graphdef, state)(*inputs)
