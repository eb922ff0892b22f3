"""Gemma 3, text only: local and global layers, norms on both sides of each block, scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxinfer.models._huggingface import (
    DECODER_WEIGHTS,
    OUT_BIAS,
    QKV_BIASES,
    ROTARY_BUFFERS,
    HFConfig,
    layer_weight,
    make_rotary,
    read_activation,
    read_layer_windows,
    read_plain_decoder,
)
from jaxinfer.nn.attention import Attention
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.config import kv_groups as kv_groups
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.nn.fused_layers import layer_weights
from jaxinfer.nn.mlp import MLP
from jaxinfer.nn.norm import RMSNorm
from jaxinfer.nn.rotary import RotaryConfig, RotaryTable
from jaxinfer.nn.weights import Weight
from kernels.decoder_layers import LayerWeights
from kernels.paged_attention import AttentionMetadata, KVCache

TINY_HF_CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "attention_bias": True,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}


def _norm(name: str) -> Weight:
    """Gemma stores norm weights less one."""
    return layer_weight(f"{name}.weight", offset=1.0)


WEIGHT_MAP = (
    DECODER_WEIGHTS
    | QKV_BIASES
    | OUT_BIAS
    | {
        "layers.{i}.input_norm.weight": _norm("input_layernorm"),
        "layers.{i}.attention.q_norm.weight": _norm("self_attn.q_norm"),
        "layers.{i}.attention.k_norm.weight": _norm("self_attn.k_norm"),
        "layers.{i}.post_attention_norm.weight": _norm("post_attention_layernorm"),
        "layers.{i}.pre_mlp_norm.weight": _norm("pre_feedforward_layernorm"),
        "layers.{i}.post_mlp_norm.weight": _norm("post_feedforward_layernorm"),
        "norm.weight": Weight(("model.norm.weight",), offset=1.0),
    }
)
IGNORED_WEIGHTS = ROTARY_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What a Gemma 3 text `config.json` says; `logits_soft_cap` is the tanh bound of the logits."""

    logits_soft_cap: float | None

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Reads `config.json`; what is optional here is off unless named, as in Gemma3TextConfig.

        transformers up to 5.24 ignores `attn_logit_softcapping` for this family; we apply it.
        """
        hf = HFConfig("gemma3_text", values)
        if hf.flag("use_bidirectional_attention", False):
            raise hf.error("use_bidirectional_attention is not supported: this decoder is causal")
        head_dim = hf.integer("head_dim")
        plain = read_plain_decoder(hf, head_dim)
        attention_bias = hf.flag("attention_bias", False)
        windows = _windows(hf)
        soft_caps = {
            ours: None if hf.raw(theirs) is None else hf.number(theirs)
            for ours, theirs in (
                ("attention_soft_cap", "attn_logit_softcapping"),
                ("logits_soft_cap", "final_logit_softcapping"),
            )
        }
        local, full = _rotaries(hf, head_dim)
        differences = {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "activation": read_activation(hf, "hidden_activation"),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", True),  # as Gemma3TextConfig
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "qk_norm": True,
            "attention_scale": hf.number("query_pre_attn_scalar") ** -0.5,
            "windows": windows,
            "rotaries": tuple(full if window is None else local for window in windows),
        }
        return cls(**(plain | differences | soft_caps))


def _windows(hf: HFConfig) -> tuple[int | None, ...]:
    """Every n-th layer is global: n is `sliding_window_pattern`, privately named for a while."""
    kinds: list[str] = []
    if hf.raw("layer_types") is None:
        private = "_sliding_window_pattern"
        pattern = hf.integer(private if hf.raw(private) else "sliding_window_pattern")
        kinds = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(hf.integer("num_hidden_layers"))
        ]
    return read_layer_windows(hf, hf.integer("sliding_window"), kinds)


def _rotaries(hf: HFConfig, head_dim: int) -> tuple[RotaryConfig, RotaryConfig]:
    """Returns the local and the global layers' rotary embeddings."""
    if hf.raw("rope_parameters") is not None:
        by_type = hf.section("rope_parameters")
        local, full = (by_type.section(f"{kind}_attention") for kind in ("sliding", "full"))
        return (
            make_rotary(local, head_dim, local.number("rope_theta")),
            make_rotary(full, head_dim, full.number("rope_theta")),
        )
    local_rotary = RotaryConfig(hf.number("rope_local_base_freq"), head_dim, None)
    scaling = hf.section("rope_scaling", {})
    return local_rotary, make_rotary(scaling, head_dim, hf.number("rope_theta"))


class Layer(nnx.Module):
    """`x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`."""

    def __init__(self, config: DecoderConfig, context: ModelContext, layer_idx: int) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps)
        self.attention = Attention(config, context, layer_idx)
        self.post_attention_norm = RMSNorm(size, eps)
        self.pre_mlp_norm = RMSNorm(size, eps)
        self.mlp = MLP(config, context)
        self.post_mlp_norm = RMSNorm(size, eps)

    def __call__(
        self,
        x: Float[Array, "T D"],
        table: RotaryTable,
        kv: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns the hidden states after this layer, and its cache."""
        attended, kv = self.attention(self.input_norm(x), table, kv, metadata)
        x = x + self.post_attention_norm(attended)
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x))), kv

    def weights(self, rotary: int) -> LayerWeights:
        """Returns its arrays, for a call that runs all layers."""
        return layer_weights(
            self.attention,
            self.mlp,
            rotary,
            input_norm=self.input_norm,
            attention_norm=self.post_attention_norm,
            mlp_input_norm=self.pre_mlp_norm,
            mlp_norm=self.post_mlp_norm,
        )


class Model(CausalLM):
    """Inputs scaled by sqrt(D), logits bounded by a tanh."""

    layer = Layer
    config: Config

    def embed(self, token_ids: Int32[Array, " T"]) -> Float[Array, "T D"]:
        """Returns scaled token vectors; the scale is rounded to the activation dtype first."""
        x = super().embed(token_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def logits(
        self, hidden: Float[Array, "R D"], num_rows: Int32[Array, ""] | None = None
    ) -> Float32[Array, "R V"]:
        """Returns `cap · tanh(logits / cap)`."""
        logits: jax.Array = super().logits(hidden, num_rows)
        cap = self.config.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
