"""What a model runs on: its memory, the dtypes that suit it, and whether codes stay codes there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxinfer import cpu
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import EngineConfig
from jaxinfer.pool_size import promised_bytes, usable_part
from jaxinfer.quantization import AUTO
from jaxinfer.runner.kv_cache import available_memory
from kernels.quantized_matmul import cpu as native_matmul


@dataclass(frozen=True)
class Platform:
    """Where a model will run.

    Attributes:
      name: "cpu", "gpu" or "tpu".
      num_devices: that share each layer.
      free_bytes: of each device; of a CPU, of the machine, which its devices share.
      dtype, weight_dtype: of activations and of weights that are not quantized.
      keeps_quantized: quantized matrices of a checkpoint stay so.
    """

    name: str
    num_devices: int
    free_bytes: int
    dtype: np.dtype
    weight_dtype: np.dtype
    keeps_quantized: bool = True


def make_platform(
    config: EngineConfig,
    name: str,
    num_devices: int,
    free_bytes: int,
    infos: Iterable[TensorInfo],
) -> Platform:
    """Returns where a checkpoint with these tensors will run.

    Args:
      config: of the engine.
      name: "cpu", "gpu" or "tpu".
      num_devices: that share each layer.
      free_bytes: of each device; of a CPU, of the machine.
      infos: the checkpoint's tensors.
    """
    dtype, weight_dtype = dtypes(config, name, infos)
    keeps_quantized = why_not_quantized(name) is None
    return Platform(name, num_devices, free_bytes, dtype, weight_dtype, keeps_quantized)


def why_not_quantized(platform: str) -> str | None:
    """Returns why nothing multiplies by codes there, or None: on CPUs only the C++ kernel does."""
    return native_matmul.unavailable() if platform == "cpu" else None


def dtypes(
    config: EngineConfig, platform: str, infos: Iterable[TensorInfo]
) -> tuple[np.dtype, np.dtype]:
    """Dtypes of activations and of weights; they differ only where "auto" chooses on a CPU.

    Codes of a checkpoint that cannot stay codes become float32: nothing is rounded a second time.

    XLA:CPU multiplies bfloat16 matrices 5 to 9 times faster than float32 where the CPU has the
    instructions, and 10 times slower where it has not; everything else it does best in float32.
    """
    bfloat16, float32 = np.dtype(jax.numpy.bfloat16), np.dtype(np.float32)
    if config.exact:
        return float32, float32
    if config.dtype != "auto":
        dtype = np.dtype(jax.numpy.dtype(config.dtype))
        return dtype, dtype
    if platform != "cpu":
        return bfloat16, bfloat16
    is_kept = config.quant is None or config.quant.lower() == AUTO
    holds_codes = any(info.codes is not None for info in infos)
    if is_kept and holds_codes and why_not_quantized(platform) is not None:
        return float32, float32
    return float32, bfloat16 if cpu.multiplies_bfloat16() else float32


def free_bytes(devices: Sequence[jax.Device], utilization: float) -> int | None:
    """Returns what the fullest of some devices has left, of a CPU the machine; None if unknown."""
    if devices[0].platform == "cpu":
        return max(0, available_memory() - promised_bytes())
    left = []
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        part = usable_part(utilization, device.platform)
        left.append(int(stats["bytes_limit"] * part) - stats["bytes_in_use"])
    return max(0, min(left))
