"""Writes a random two-layer llama of bytes, enough where no answer must make sense.

python benchmarks/conformance/tiny_checkpoint.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxinfer.testing import byte_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tensors() -> dict[str, np.ndarray]:
    """Returns float32 weights by Hugging Face name."""
    rng = np.random.default_rng(7)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    heads, kv_heads = (
        CONFIG[name] * CONFIG["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (heads, hidden),
                "self_attn.k_proj": (kv_heads, hidden),
                "self_attn.v_proj": (kv_heads, hidden),
                "self_attn.o_proj": (hidden, heads),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    made = {
        f"{name}.weight": rng.standard_normal(shape).astype(np.float32) / 8
        for name, shape in shapes.items()
    }
    # Answers end by their length: nothing points towards the end of the text.
    made["lm_head.weight"][CONFIG["eos_token_id"]] = 0.0
    norms = ["model.norm"]
    for layer in range(CONFIG["num_hidden_layers"]):
        norms += [f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention")]
    return made | {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}


def safetensors_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Returns a safetensors file."""
    header, offset = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in arrays.values())


def write(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes the checkpoint, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors()))
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_json())
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
