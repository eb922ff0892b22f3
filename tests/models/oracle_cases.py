"""The cases both sides of the parity tests build: configurations, token ids and weights by name.

Imported by the tests and by `make_oracle.py`; knows neither jax nor torch.
"""

import zlib

import numpy as np

from jaxinfer.models import load_model_module

NUM_TOKENS = 40
NEW_STYLE_LLAMA_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
NEW_STYLE_GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9000.0},
}
_PLAIN = {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}

# name -> (family, differences from its TINY_HF_CONFIG; the value DROP removes a key)
DROP = object()
_DIFFERENCES = {
    "llama": ("llama", {}),
    "llama_plain": ("llama", _PLAIN | {"head_dim": None, "tie_word_embeddings": True}),
    "llama_attention_bias": ("llama", {"mlp_bias": False, "rope_scaling": None}),
    "llama_mlp_bias": ("llama", {"attention_bias": False, "rms_norm_eps": 1e-3}),
    "llama_linear": (
        "llama",
        _PLAIN | {"rope_scaling": {"type": "linear", "factor": 4.0}, "num_key_value_heads": 4},
    ),
    "llama_rope_parameters": (
        "llama",
        _PLAIN
        | {"rope_scaling": DROP, "rope_theta": DROP, "num_key_value_heads": 1}
        | {"rope_parameters": NEW_STYLE_LLAMA_ROPE, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral": ("mistral", {}),
    "mistral_no_window": ("mistral", {"sliding_window": None, "head_dim": DROP}),
    "qwen2": ("qwen2", {}),
    "qwen2_layer_types": (
        "qwen2",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"sliding_window": 7, "tie_word_embeddings": False},
    ),
    "qwen2_no_window": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3_window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        | {"attention_bias": False, "tie_word_embeddings": False},
    ),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text_rope_parameters": (
        "gemma3_text",
        {"rope_theta": DROP, "rope_local_base_freq": DROP, "rope_scaling": DROP}
        | {"rope_parameters": NEW_STYLE_GEMMA_ROPE, "sliding_window_pattern": DROP}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"attention_bias": False, "num_key_value_heads": 2},
    ),
}
CASES = tuple(_DIFFERENCES)


def hf_config(case):
    """Returns the case's `config.json`."""
    family, differences = _DIFFERENCES[case]
    merged = load_model_module(family).TINY_HF_CONFIG | differences
    return {key: value for key, value in merged.items() if value is not DROP}


def token_ids(config):
    """Returns the sequence every case is run on."""
    rng = np.random.default_rng(config["vocab_size"])
    return rng.integers(0, config["vocab_size"], NUM_TOKENS).tolist()


def tensor(name, shape, model_type):
    """Returns the checkpoint tensor of this Hugging Face name: a function of the name alone."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if name.endswith("norm.weight") or "layernorm" in name:
        return 0.2 * values + np.float32(model_type != "gemma3_text")
    scale = 0.3 if len(shape) == 1 or "embed" in name else shape[1] ** -0.5
    return values * np.float32(scale)
