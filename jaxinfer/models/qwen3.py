"""Qwen3: Llama with normed queries and keys, a free head_dim, and optional attention biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models._huggingface import (
    DECODER_WEIGHTS,
    OUT_BIAS,
    QKV_BIASES,
    ROTARY_BUFFERS,
    HFConfig,
    layer_weight,
    read_activation,
    read_plain_decoder,
    read_rotary,
    read_upper_windows,
)
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.config import kv_groups as kv_groups
from jaxinfer.nn.decoder import CausalLM

TINY_HF_CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": True,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}

WEIGHT_MAP = (
    DECODER_WEIGHTS
    | QKV_BIASES
    | OUT_BIAS
    | {
        "layers.{i}.attention.q_norm.weight": layer_weight("self_attn.q_norm.weight"),
        "layers.{i}.attention.k_norm.weight": layer_weight("self_attn.k_norm.weight"),
    }
)
IGNORED_WEIGHTS = ROTARY_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What a Qwen3 `config.json` says."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Reads `config.json`."""
        hf = HFConfig("qwen3", values)
        head_dim = hf.integer("head_dim")
        plain = read_plain_decoder(hf, head_dim)
        attention_bias = hf.flag("attention_bias", False)  # a feature that is off unless named
        differences = {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "activation": read_activation(hf),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", False),  # Qwen3Config's default
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "qk_norm": True,
            "windows": read_upper_windows(hf),
            "rotaries": (read_rotary(hf, head_dim),) * plain["num_layers"],
        }
        return cls(**(plain | differences))


class Model(CausalLM):
    """The skeleton as it is."""
