"""The memory plan of a model that is about to be loaded, against the devices it will run on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import jax

from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import EngineConfig
from jaxinfer.memory_plan import MemoryPlan, Platform, check_plan, make_plan
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.kv_cache import available_memory

logger = logging.getLogger(__name__)


def check_memory(
    config: EngineConfig, model: CausalLM, infos: Mapping[str, TensorInfo]
) -> MemoryPlan | None:
    """Logs what the model will take; None, and no check, where a device does not tell its memory.

    Args:
      config: `quant` names a scheme, not "auto".
      model: abstract.
      infos: of its checkpoint.

    Raises:
      ConfigError: it does not fit; names what would.
    """
    context = model.context
    free = free_bytes(list(context.mesh.devices.flat), config.gpu_memory_utilization)
    if free is None:
        logger.warning("the device does not tell its memory: nothing is planned")
        return None
    where = Platform(
        name=context.platform,
        num_devices=context.tensor_parallel,
        free_bytes=free,
        dtype=context.dtype,
        weight_dtype=context.weight_dtype,
        keeps_quantized=context.keeps_quantized,
    )
    plan = make_plan(config, model.config, infos, where)
    check_plan(plan, config, model.config, infos, where)
    logger.info("memory plan:\n%s", plan.table())
    return plan


def free_bytes(devices: Sequence[jax.Device], utilization: float) -> int | None:
    """Returns what the fullest of some devices has left, of a CPU the machine; None if unknown."""
    if devices[0].platform == "cpu":
        return available_memory()
    left = []
    for device in devices:
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            return None
        left.append(int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"])
    return max(0, min(left))
