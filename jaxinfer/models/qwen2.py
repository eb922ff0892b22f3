"""Qwen2: Llama with query, key and value biases and, where switched on, windowed upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models._huggingface import (
    DECODER_WEIGHTS,
    QKV_BIASES,
    ROTARY_BUFFERS,
    HFConfig,
    read_activation,
    read_head_dim,
    read_plain_decoder,
    read_rotary,
    read_upper_windows,
)
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.config import kv_groups as kv_groups
from jaxinfer.nn.decoder import CausalLM

TINY_HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}

WEIGHT_MAP = DECODER_WEIGHTS | QKV_BIASES
IGNORED_WEIGHTS = ROTARY_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What a Qwen2 `config.json` says."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Reads `config.json`; the biases are part of the family and have no key."""
        hf = HFConfig("qwen2", values)
        head_dim = read_head_dim(hf)
        plain = read_plain_decoder(hf, head_dim)
        differences = {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "activation": read_activation(hf),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", False),  # Qwen2Config's default
            "qkv_bias": True,
            "windows": read_upper_windows(hf),
            "rotaries": (read_rotary(hf, head_dim),) * plain["num_layers"],
        }
        return cls(**(plain | differences))


class Model(CausalLM):
    """The skeleton as it is."""
