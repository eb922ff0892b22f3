"""Writes rounding_oracle.npz: matrices and the blocks gguf-py makes of them.

Run in an environment with the `oracle` extra: python tests/kernels/make_rounding_oracle.py
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def matrix() -> np.ndarray:
    """Float32 `[24, 64]`: plain rows, tiny ones, ties of codes and of sizes, zeros, one spike."""
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    weight[6:12] *= np.float32(1e-3)
    weight[12:16] = rng.integers(-254, 255, (4, 64)) / np.float32(2)
    weight[12:16, ::32] = 127
    weight[16:20] = rng.integers(-2, 3, (4, 64))
    weight[20, :32] = 0
    weight[21] = 0
    weight[22] = -0.0
    weight[23, 40] = 100
    return weight


def main() -> None:
    weight = matrix()
    blocks = {
        name: gguf.quantize(weight, gguf.GGMLQuantizationType[name]) for name in ("Q8_0", "Q4_0")
    }
    np.savez_compressed(Path(__file__).with_name("rounding_oracle.npz"), weight=weight, **blocks)


if __name__ == "__main__":
    main()
