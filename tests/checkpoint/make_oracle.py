"""Writes oracle.npz: what gguf-py and transformers say, for tests that run without them.

Run in an environment with the `oracle` extra: python tests/checkpoint/make_oracle.py
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
QUANTIZED += ("Q2_K", "Q3_K", "MXFP4")
NUM_BLOCKS = 24


def block_pair(name: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks whose weights are finite, and those weights."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = rng.integers(0, 256, (400, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = gguf.dequantize(blocks, kind)
    keep = np.isfinite(weights).all(axis=1).nonzero()[0][:NUM_BLOCKS]
    assert len(keep) == NUM_BLOCKS
    return blocks[keep], weights[keep]


def llama3_factors(factor: float) -> np.ndarray:
    """What Llama 3's frequencies are divided by, by transformers' formula, float32 `[32]`."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (np.arange(0, 64, 2, dtype=np.float32) / np.float32(64))
    return (plain / scaled.numpy()).astype(np.float32)


def main() -> None:
    rng = np.random.default_rng(20)
    arrays = {f"llama3_factors_{factor:.0f}": llama3_factors(factor) for factor in (8.0, 32.0)}
    for name in QUANTIZED:
        arrays[f"{name}_blocks"], arrays[f"{name}_weights"] = block_pair(name, rng)
    np.savez_compressed(Path(__file__).with_name("oracle.npz"), **arrays)


if __name__ == "__main__":
    main()
