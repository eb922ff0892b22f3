"""Llama: the plain pre-norm decoder, with optional biases."""

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
    read_head_dim,
    read_plain_decoder,
    read_rotary,
)
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.config import kv_groups as kv_groups
from jaxinfer.nn.decoder import CausalLM

TINY_HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 97,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}

WEIGHT_MAP = (
    DECODER_WEIGHTS
    | QKV_BIASES
    | OUT_BIAS
    | {
        "layers.{i}.mlp.gate_up.bias": layer_weight("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "layers.{i}.mlp.down.bias": layer_weight("mlp.down_proj.bias"),
    }
)
IGNORED_WEIGHTS = ROTARY_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What a Llama `config.json` says."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Reads `config.json`.

        Defaults are LlamaConfig's, for keys that files of earlier transformers versions lack:
        num_key_value_heads (before 4.31), rope_theta, attention_bias (4.33), mlp_bias (4.41).
        """
        hf = HFConfig("llama", values)
        head_dim = read_head_dim(hf)
        plain = read_plain_decoder(hf, head_dim)
        attention_bias = hf.flag("attention_bias", False)
        differences = {
            "num_kv_heads": hf.integer("num_key_value_heads", plain["num_heads"]),
            "activation": read_activation(hf),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "mlp_bias": hf.flag("mlp_bias", False),
            "rotaries": (read_rotary(hf, head_dim, 10000.0),) * plain["num_layers"],
        }
        return cls(**(plain | differences))


class Model(CausalLM):
    """The skeleton as it is."""
