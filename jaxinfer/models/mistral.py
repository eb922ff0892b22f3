"""Mistral: Llama without biases, with one attention window for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.models._huggingface import (
    DECODER_WEIGHTS,
    ROTARY_BUFFERS,
    HFConfig,
    read_activation,
    read_head_dim,
    read_plain_decoder,
    read_rotary,
)
from jaxinfer.nn.config import DecoderConfig
from jaxinfer.nn.config import kv_groups as kv_groups
from jaxinfer.nn.decoder import CausalLM

TINY_HF_CONFIG = {
    "model_type": "mistral",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "tie_word_embeddings": False,
}

WEIGHT_MAP = DECODER_WEIGHTS
IGNORED_WEIGHTS = ROTARY_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """What a Mistral `config.json` says."""

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> Config:
        """Reads `config.json`; a `sliding_window` of null means none, its absence is an error."""
        hf = HFConfig("mistral", values)
        if "sliding_window" not in values:
            raise hf.error("the key 'sliding_window' is missing; null says that there is none")
        window = None if hf.raw("sliding_window") is None else hf.integer("sliding_window")
        head_dim = read_head_dim(hf)
        plain = read_plain_decoder(hf, head_dim)
        differences = {
            "num_kv_heads": hf.integer("num_key_value_heads"),
            "activation": read_activation(hf),
            "tie_word_embeddings": hf.flag("tie_word_embeddings", False),  # MistralConfig's default
            "windows": (window,) * plain["num_layers"],
            "rotaries": (read_rotary(hf, head_dim),) * plain["num_layers"],
        }
        return cls(**(plain | differences))


class Model(CausalLM):
    """The skeleton as it is."""
