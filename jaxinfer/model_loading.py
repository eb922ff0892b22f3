"""From a checkpoint and a configuration to a filled model: mesh, dtypes, formats, weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxinfer import cpu
from jaxinfer.checkpoint import Checkpoint
from jaxinfer.checkpoint.checkpoint import TensorInfo
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.memory_check import check_memory, free_bytes
from jaxinfer.memory_plan import Platform
from jaxinfer.models import load_model_module
from jaxinfer.nn.config import DecoderConfig, KVGroup
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.quant_choice import decide_quant
from jaxinfer.quantization import AUTO, QuantScheme, make_scheme
from jaxinfer.runner.loader import check_tensors, load_weights, make_abstract_model
from kernels import paged_attention, quantized_matmul
from kernels.quantized_matmul import cpu as native_matmul
from kernels.quantized_matmul.format import GROUP_SIZES

logger = logging.getLogger(__name__)


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


def load_model(
    config: EngineConfig, checkpoint: Checkpoint, progress: bool
) -> tuple[CausalLM, tuple[KVGroup, ...]]:
    """Returns the filled model and its KV groups."""
    module = load_model_module(checkpoint.model_type)
    model_config = module.Config.from_hf(checkpoint.hf_config)
    mesh = make_mesh(config.tensor_parallel, config.allow_fewer_devices)
    platform = mesh.devices.flat[0].platform
    # What can be refused at once is, before seconds or minutes of loading.
    for flag, op in (("attention", paged_attention), ("matmul", quantized_matmul)):
        _check_implementation(flag, getattr(config, flag), op.IMPLEMENTATIONS, platform)
    config = _with_quant(config, mesh, checkpoint.tensor_infos)
    scheme = None if config.quant is None else make_scheme(config.quant, config.quant_group_size)
    context_length(config, model_config)
    context = _context(config, mesh, scheme, tuple(checkpoint.tensor_infos.values()))
    model = make_abstract_model(module, model_config, context)
    shapes = {name: info.shape for name, info in checkpoint.tensor_infos.items()}
    try:
        check_tensors(model, module, shapes)
        check_memory(config, model, checkpoint.tensor_infos)
        load_weights(model, module, checkpoint.tensors(progress))
    except ValueError as error:
        error.add_note(f"checkpoint: {checkpoint.path}")
        raise
    return model, module.kv_groups(model_config)


def _context(
    config: EngineConfig, mesh: Mesh, scheme: QuantScheme | None, infos: Sequence[TensorInfo]
) -> ModelContext:
    """Decides dtypes, and whether the checkpoint's quantized matrices can stay as they are."""
    platform = mesh.devices.flat[0].platform
    dtype, weight_dtype = dtypes(config, platform, infos)
    stored = [info for info in infos if info.loaded_bytes is not None]
    keeps_quantized = can_keep_quantized(platform)
    if stored and scheme is None and not keeps_quantized:
        kept = sum(info.loaded_bytes or 0 for info in stored)
        floats = sum(np.prod(info.shape) * weight_dtype.itemsize for info in stored)
        logger.warning(
            "%s: the quantized weights become %s, which costs %.0f MB more",
            native_matmul.unavailable(),
            weight_dtype.name,
            (floats - kept) / 1e6,
        )
    return ModelContext(
        mesh=mesh,
        platform=platform,
        dtype=dtype,
        weight_dtype=weight_dtype,
        precision="highest" if config.exact else None,
        attention=config.attention,
        matmul=config.matmul,
        quant=scheme,
        keeps_quantized=keeps_quantized,
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


def can_keep_quantized(platform: str) -> bool:
    """Whether something multiplies by codes there: on CPUs only the C++ kernel does."""
    return platform != "cpu" or native_matmul.is_available()


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
    holds_codes = any(info.loaded_bytes is not None for info in infos)
    if is_kept and holds_codes and not can_keep_quantized(platform):
        return float32, float32
    has_products = {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu.features().split())
    return float32, bfloat16 if has_products else float32


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


def _with_quant(config: EngineConfig, mesh: Mesh, infos: Mapping[str, TensorInfo]) -> EngineConfig:
    """Returns the configuration with `auto` decided; warns where quantization costs time.

    Raises:
      ConfigError: there is no such scheme, or `auto` has nothing to decide by.
    """
    platform = mesh.devices.flat[0].platform
    unavailable = native_matmul.unavailable() if platform == "cpu" else None
    free = free_bytes(list(mesh.devices.flat), config.gpu_memory_utilization)
    if free is None and config.quant is not None and config.quant.lower() == AUTO:
        raise ConfigError("quant auto: the device does not tell its memory; name a scheme")
    where = Platform(platform, mesh.size, free or 0, *dtypes(config, platform, infos.values()))
    config = decide_quant(config, infos, where, unavailable)
    if config.quant is not None and unavailable is not None:
        logger.warning(
            "quant %s: %s; XLA:CPU dequantizes each matrix at every step, which is slower than "
            "without --quant",
            config.quant,
            unavailable,
        )
    return config
