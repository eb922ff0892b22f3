"""What `--quant` means for one checkpoint on one machine: `auto` is decided here, and said."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.platforms import Platform
from jaxinfer.quantization import (
    AUTO,
    AUTO_CANDIDATES,
    SCHEMES,
    choose_scheme,
    make_scheme,
    scheme_name,
    weight_bytes,
)

logger = logging.getLogger(__name__)


def decide_quant(
    config: EngineConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform,
    unavailable: str | None = None,
) -> EngineConfig:
    """Returns the configuration with `quant` the name of a scheme, or None.

    Says in one line what `auto` chose and why, and warns where weights are rounded a second time.

    Args:
      config: of the engine.
      infos: the checkpoint's tensors by name.
      where: the devices.
      unavailable: why codes do not stay codes there, or None where they do.

    Raises:
      ConfigError: there is no such scheme, or its groups are not free to choose.
    """
    if config.quant is None:
        return config
    stored = sorted({info.dtype for info in infos.values() if info.loaded_bytes is not None})
    try:
        name = scheme_name(config.quant)
        if name != AUTO:
            make_scheme(name, config.quant_group_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if name == AUTO:
        chosen, reason = _choose(infos, where, stored, unavailable)
        logger.info("quant auto: %s", reason)
        group_size = None if chosen is None else config.quant_group_size
        return replace(config, quant=chosen, quant_group_size=group_size)
    if stored:
        logger.warning(
            "quant %s: the checkpoint is already quantized (%s), so its weights are rounded twice; "
            "leave --quant out to keep them as they are",
            name,
            ", ".join(stored),
        )
    return replace(config, quant=name)


def _choose(
    infos: Mapping[str, TensorInfo], where: Platform, stored: list[str], unavailable: str | None
) -> tuple[str | None, str]:
    """Returns a scheme's name or None, and why."""
    if stored:
        return None, f"the checkpoint is quantized already ({', '.join(stored)}), and stays so"
    shapes = {info.name: info.shape for info in infos.values()}
    schemes = {name: None if name is None else SCHEMES[name] for name in AUTO_CANDIDATES}
    sizes = {
        name: weight_bytes(shapes, scheme, where.weight_dtype.itemsize)
        for name, scheme in schemes.items()
    }
    # The devices of a CPU share its memory.
    devices = 1 if where.name == "cpu" else where.num_devices
    return choose_scheme(where.name, where.free_bytes * devices, sizes, unavailable)
