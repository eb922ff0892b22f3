"""A tiny llama as a directory in Hugging Face's layout, and what an attacker would put into one."""

import json
import pickle

import ml_dtypes
import numpy as np
from checkpoint.builders import safetensors_bytes

from jaxinfer.models import load_model_module
from jaxinfer.testing import byte_tokenizer

CONFIG = load_model_module("llama").TINY_HF_CONFIG | {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
}


def tiny_tensors(config=CONFIG):
    """Random bfloat16 tensors of a llama with one layer, by name."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    layer = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head"]
    rng = np.random.default_rng(11)
    return {
        f"{name}.weight": (rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def write_model(path, config=CONFIG):
    """A model directory with a tokenizer, as the hub would have it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    (path / "model.safetensors").write_bytes(safetensors_bytes(tiny_tensors(config)))
    (path / "tokenizer.json").write_text(byte_tokenizer().to_json())
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    return path


class _Opened:
    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


def pickle_that_makes(trace):
    """Returns a pickle; whoever loads it makes a file."""
    return pickle.dumps(_Opened(trace))


def add_remote_code(path, trace, **config):
    """Makes a model directory ask for code of its own, which makes a file when it is imported."""
    code = f"open({str(trace)!r}, 'w').close()\n"
    for name in ("configuration", "modeling", "tokenization"):
        (path / f"{name}_tiny.py").write_text(code)
    (path / "pytorch_model.bin").write_bytes(pickle_that_makes(trace))
    auto_map = {
        "AutoConfig": "configuration_tiny.TinyConfig",
        "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
    }
    changes = {
        "config.json": {"auto_map": auto_map, "trust_remote_code": True, **config},
        "tokenizer_config.json": {
            "tokenizer_class": "TinyTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_tiny.TinyTokenizer", None]},
        },
    }
    for name, values in changes.items():
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | values))
    return path
