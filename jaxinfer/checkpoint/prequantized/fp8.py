"""float8_e4m3fn weights by block, row or tensor: DeepSeek's, vLLM's and FBGEMM's checkpoints.

Activations stay floats: what a file says about quantizing them is not used.
"""

from __future__ import annotations

from jaxinfer.checkpoint.prequantized.method import Matrix, Module
from jaxinfer.checkpoint.prequantized.scales import Blocks, scaled_weight
from jaxinfer.checkpoint.prequantized.settings import Settings

_SCALES = ("weight_scale_inv", "weight_scale")  # both multiply: "inv" is the quantizer's view


class Fp8:
    """quant_method `fp8` or `fbgemm_fp8`."""

    parts = ("weight", *_SCALES)
    ignored = (".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale")

    def __init__(self, settings: Settings) -> None:
        """Checks a quantization_config; raises CheckpointError."""
        settings.text("activation_scheme", ("dynamic", "static"), "dynamic")
        settings.text("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._blocks = parse_block(settings, "weight_block_size")

    def matrix(self, module: Module) -> Matrix:
        """Returns what `module.weight` is; raises CheckpointError."""
        part = next((part for part in _SCALES if part in module.parts), _SCALES[0])
        blocks = self._blocks
        if blocks is None:
            scale = module.parts.get(part)
            one_scale = scale is not None and scale.shape in ((), (1,), (1, 1))
            blocks = Blocks(None if one_scale else 1, None)
        return scaled_weight(module, blocks, "F8_E4M3", name="FP8", scale_part=part)


def parse_block(settings: Settings, key: str) -> Blocks | None:
    """Returns `[rows, columns]` as Blocks, None where the key is absent; raises CheckpointError."""
    value = settings.values.get(key)
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and 0 < size < 1 << 31 for size in value)
    ):
        raise settings.error(key, "must be a list of two positive sizes, rows and columns")
    return Blocks(*value)
