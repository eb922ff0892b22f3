"""Quantized safetensors: which method wrote them, and their matrices as QuantizedArray.

A method is a class in a file of its own that is made from a quantization_config and does what
`method.Method` says, and a line in METHODS under its `quant_method`. It sees no file system: it
gets one Module of stored tensors at a time and returns its Matrix, which reads it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.checkpoint.prequantized.awq import Awq
from jaxinfer.checkpoint.prequantized.bitsandbytes import Bitsandbytes
from jaxinfer.checkpoint.prequantized.compressed_tensors import CompressedTensors
from jaxinfer.checkpoint.prequantized.fp8 import Fp8
from jaxinfer.checkpoint.prequantized.gptq import Gptq
from jaxinfer.checkpoint.prequantized.method import Method, Module, Stored, Weight
from jaxinfer.checkpoint.prequantized.settings import Settings
from jaxinfer.checkpoint.prequantized.stored import QUANT_METHOD, StoredArrays
from jaxinfer.checkpoint.safetensors import FLOAT_DTYPES

METHODS: dict[str, Callable[[Settings], Method]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "bitsandbytes": Bitsandbytes,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    QUANT_METHOD: StoredArrays,
}
"""From quant_method to what makes a Method of a quantization_config, or raises CheckpointError."""

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where config.json may hold it; the second is compressed-tensors' first name for it."""


def find_method(config: Mapping[str, Any], where: Path) -> Method | None:
    """Returns the method of a `config.json` at `where`; None where nothing is quantized.

    Raises:
      CheckpointError: the method is unknown, or it cannot do what the configuration says.
    """
    key = next((key for key in CONFIG_KEYS if config.get(key)), None)
    if key is None:
        return None
    settings = Settings(config, str(where)).section(key)
    assert settings is not None
    name = settings.values.get("quant_method")
    if name is None and settings.values.keys() & {"load_in_4bit", "load_in_8bit"}:
        name = "bitsandbytes"  # its first configurations did not say
    if not isinstance(name, str) or name.lower() not in METHODS:
        raise settings.error(
            "quant_method",
            f"supported are {', '.join(METHODS)}; use one of those, the unquantized model or a "
            "GGUF file",
        )
    return METHODS[name.lower()](settings)


def group_modules(stored: Mapping[str, Stored], method: Method) -> dict[str, Module]:
    """Returns, by tensor name, the module with a quantized weight that each tensor belongs to.

    Raises:
      CheckpointError: a module has its weight twice.
    """
    parts = sorted(method.parts, key=len, reverse=True)
    found: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        part = next((part for part in parts if name.endswith("." + part)), None)
        if part is not None:
            found.setdefault(name[: -len(part) - 1], {})[part] = tensor
    modules: dict[str, Module] = {}
    for name, of_module in found.items():
        if of_module.keys() == {"weight"} and of_module["weight"].dtype in FLOAT_DTYPES:
            continue
        if "weight" not in of_module and f"{name}.weight" in stored:
            twice = next(iter(of_module.values()))
            raise twice.error(f"{name} has an unquantized weight as well; remove one of them")
        module = Module(name, of_module)
        modules |= {f"{name}.{part}": module for part in of_module}
    return modules


def quantized_weight(module: Module, method: Method) -> Weight:
    """Returns the weight of a module, checked as far as headers go; raises CheckpointError."""
    matrix = method.matrix(module)
    module.refuse_surplus()
    name = f"{module.name}.weight"
    sources = tuple(module.parts.values())
    num_bytes = sum(source.tensor.num_bytes for source in sources)
    shape = matrix.codes.shape
    info = TensorInfo(name, shape, matrix.dtype, num_bytes, matrix.codes, matrix.is_certain)
    return Weight(info, matrix.read, sources)
