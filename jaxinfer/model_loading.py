"""From a checkpoint and a configuration to a filled model: mesh, dtypes, formats, weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer.checkpoint import Checkpoint
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.memory_plan import check_plan, make_plan
from jaxinfer.models import load_model_module
from jaxinfer.nn.config import DecoderConfig, KVGroup
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.platforms import Platform, free_bytes, make_platform, why_not_quantized
from jaxinfer.quant_choice import decide_quant
from jaxinfer.quantization import AUTO, make_scheme
from jaxinfer.runner.loader import (
    abstract_weights,
    check_tensors,
    load_weights,
    make_abstract_model,
)
from kernels import paged_attention, quantized_matmul
from kernels.quantized_matmul.format import GROUP_SIZES

logger = logging.getLogger(__name__)

_NEVER_RUN = "the code that auto_map names is never run"


def make_mesh(tensor_parallel: int, allow_fewer: bool = False) -> Mesh:
    """Returns the mesh (data, tensor) over the first devices of the default platform.

    Raises:
      ConfigError: there are fewer devices than `tensor_parallel`.
    """
    devices = jax.devices()
    if tensor_parallel > len(devices):
        message = (
            f"tensor_parallel is {tensor_parallel}, but there are {len(devices)} "
            f"{devices[0].platform} devices"
        )
        if not allow_fewer:
            raise ConfigError(f"{message}; lower it")
        logger.warning("%s; using %d", message, len(devices))
        tensor_parallel = len(devices)
    return Mesh(np.array(devices[:tensor_parallel]).reshape(1, -1), ("data", "tensor"))


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model with its weights, or with their dtypes, shapes and shardings and how to get them.

    Attributes:
      model: filled, or abstract where there is `fill`.
      groups: its KV groups.
      fill: loads the weights into the model; None where they are there.
      quant: the scheme its weights are rounded to at load, `auto` decided; None for none.
    """

    model: CausalLM
    groups: tuple[KVGroup, ...]
    fill: Callable[[], None] | None = None
    quant: str | None = None


def prepare_model(config: EngineConfig, checkpoint: Checkpoint, progress: bool) -> PreparedModel:
    """Returns the model, without its weights yet where programs are to be compiled before.

    On a CPU they are: compilers need memory where the weights will lie. Elsewhere what the weights
    leave decides the size of the KV pool, which programs depend on. Weights also come first where
    their format is not certain before they are read.

    Raises:
      ValueError: the checkpoint or the configuration cannot be used.
    """
    module = _family(checkpoint)
    model_config = module.Config.from_hf(checkpoint.hf_config)
    mesh = make_mesh(config.tensor_parallel, config.allow_fewer_devices)
    platform = mesh.devices.flat[0].platform
    # What can be refused at once is, before seconds or minutes of loading.
    for flag, op in (("attention", paged_attention), ("matmul", quantized_matmul)):
        _check_implementation(flag, getattr(config, flag), op.IMPLEMENTATIONS, platform)
    infos = checkpoint.tensor_infos
    free = free_bytes(list(mesh.devices.flat), config.gpu_memory_utilization)
    config = _with_quant(config, infos, mesh, free)
    context_length(config, model_config)
    where = _platform(config, infos, mesh, free)
    model = make_abstract_model(module, model_config, _context(config, mesh, where, infos))
    with _naming(checkpoint):
        check_tensors(model, module, {name: info.shape for name, info in infos.items()})
        _check_memory(config, model_config, infos, None if free is None else where)
    fill = partial(_fill, model, module, checkpoint, progress)
    groups = module.kv_groups(model_config)
    if platform != "cpu" or not all(info.is_certain for info in infos.values()):
        fill()
        return PreparedModel(model, groups, quant=config.quant)
    with _naming(checkpoint):
        abstract_weights(model, module, {name: info.codes for name, info in infos.items()})
    return PreparedModel(model, groups, fill, config.quant)


def _family(checkpoint: Checkpoint) -> ModuleType:
    """Returns our code for the model; a checkpoint may ask for code of its own, in vain."""
    asks = "auto_map" in checkpoint.hf_config
    try:
        module = load_model_module(checkpoint.model_type)
    except ValueError as error:
        raise ValueError(f"{error}; {_NEVER_RUN}") if asks else error from None
    if asks:
        logger.warning("%s/config.json: %s", checkpoint.path, _NEVER_RUN)
    return module


def load_model(
    config: EngineConfig, checkpoint: Checkpoint, progress: bool
) -> tuple[CausalLM, tuple[KVGroup, ...]]:
    """Returns the filled model and its KV groups; raises as `prepare_model`."""
    prepared = prepare_model(config, checkpoint, progress)
    if prepared.fill is not None:
        prepared.fill()
    return prepared.model, prepared.groups


def _fill(model: CausalLM, module: ModuleType, checkpoint: Checkpoint, progress: bool) -> None:
    with _naming(checkpoint):
        load_weights(model, module, checkpoint.tensors(progress))


def _check_memory(
    config: EngineConfig,
    model: DecoderConfig,
    infos: Mapping[str, TensorInfo],
    where: Platform | None,
) -> None:
    """Logs what the model will take; no check where a device does not tell its memory.

    Raises:
      ConfigError: it does not fit; names what would.
    """
    if where is None:
        logger.warning("the device does not tell its memory: nothing is planned")
        return
    plan = make_plan(config, model, infos, where)
    check_plan(plan, config, model, infos, where)
    logger.info("memory plan:\n%s", plan.table())


@contextmanager
def _naming(checkpoint: Checkpoint) -> Iterator[None]:
    """Adds the checkpoint's path to what is wrong with it."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"checkpoint: {checkpoint.path}")
        raise


def _context(
    config: EngineConfig, mesh: Mesh, where: Platform, infos: Mapping[str, TensorInfo]
) -> ModelContext:
    """Says what the model is to know of where it runs; warns where codes cannot stay codes."""
    scheme = None if config.quant is None else make_scheme(config.quant, config.quant_group_size)
    stored = [info for info in infos.values() if info.codes is not None]
    if stored and scheme is None and not where.keeps_quantized:
        kept = sum(info.loaded_bytes or 0 for info in stored)
        floats = sum(np.prod(info.shape) * where.weight_dtype.itemsize for info in stored)
        logger.warning(
            "%s: the quantized weights become %s, which costs %.0f MB more",
            why_not_quantized(where.name),
            where.weight_dtype.name,
            (floats - kept) / 1e6,
        )
    return ModelContext(
        mesh=mesh,
        platform=where.name,
        dtype=where.dtype,
        weight_dtype=where.weight_dtype,
        precision="highest" if config.exact else None,
        attention=config.attention,
        matmul=config.matmul,
        quant=scheme,
        keeps_quantized=where.keeps_quantized,
        stored_group_size=_stored_group_size(stored, mesh),
    )


def _stored_group_size(stored: Sequence[TensorInfo], mesh: Mesh) -> int:
    """Returns what padded widths are a multiple of, so that no device gets part of a group."""
    platform = mesh.devices.flat[0].platform
    if not stored or (mesh.size == 1 and platform != "tpu"):
        return 1
    # On a TPU rows are lanes: of other widths they would be copied at every call.
    sizes = [info.group_size for info in stored if info.group_size in GROUP_SIZES]
    return max(GROUP_SIZES) if platform == "tpu" else max([1, *filter(None, sizes)])


def context_length(config: EngineConfig, model_config: DecoderConfig) -> int:
    """Returns the longest sequence to serve; raises ConfigError beyond what the model knows."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for {limit} "
            "positions; lower it"
        )
    return config.max_model_len or limit


def _check_implementation(
    flag: str, name: str | None, table: Mapping[str, tuple[str, ...]], platform: str
) -> None:
    if platform not in table:
        raise ConfigError(
            f"jax runs on {platform!r}, for which there is no {flag}; set JAX_PLATFORMS to one "
            f"of {', '.join(table)}"
        )
    if name not in (None, *table[platform]):
        raise ConfigError(
            f"{flag} {name!r} is not available on {platform}; choose one of "
            f"{', '.join(table[platform])}"
        )


def _with_quant(
    config: EngineConfig, infos: Mapping[str, TensorInfo], mesh: Mesh, free: int | None
) -> EngineConfig:
    """Returns the configuration with `auto` decided; warns where quantization costs time.

    Args:
      free: bytes of each device, None where they do not tell.

    Raises:
      ConfigError: there is no such scheme, or `auto` has nothing to decide by.
    """
    if free is None and config.quant is not None and config.quant.lower() == AUTO:
        raise ConfigError("quant auto: the device does not tell its memory; name a scheme")
    where = _platform(config, infos, mesh, free)
    unavailable = why_not_quantized(where.name)
    config = decide_quant(config, infos, where, unavailable)
    if config.quant is not None and unavailable is not None:
        logger.warning(
            "quant %s: %s; XLA:CPU dequantizes each matrix at every step, which is slower than "
            "without --quant",
            config.quant,
            unavailable,
        )
    return config


def _platform(
    config: EngineConfig, infos: Mapping[str, TensorInfo], mesh: Mesh, free: int | None
) -> Platform:
    name = mesh.devices.flat[0].platform
    return make_platform(config, name, mesh.size, free or 0, infos.values())
