"""How the KV cache is held, and how many pages it gets: what is asked for, or what is left."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakSet

import jax
import numpy as np

from jaxinfer import cpu
from jaxinfer.checkpoint import CheckpointError, resolve_model
from jaxinfer.config import XLA_FRACTION, ConfigError, EngineConfig
from jaxinfer.nn.config import DecoderConfig, num_cache_kv_heads
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.buckets import Ladders
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import CacheSpec, available_memory, cpu_pool_bytes, default_page_size
from jaxinfer.runner.loader import bytes_to_load
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.runner.runner_config import RunnerConfig
from kernels import paged_attention

logger = logging.getLogger(__name__)

GRAIN = 256 * 2**20
"""Pools sized from free memory are multiples of this: a few bytes of difference between two runs
must not change the programs' shapes, or the compilation cache would miss."""

_XLA_DEFAULT = 0.75
"""Part of a GPU's memory that XLA takes where nobody says otherwise."""

MAX_BULK_STEPS, CPU_BULK_ROWS = 4, 2
BULK_BYTES = 600 * 10**6
"""What a CPU reads of weights in about 20 ms, at 30 GB/s."""


_pools: WeakSet[ModelRunner] = WeakSet()


def promise_pool(runner: ModelRunner) -> None:
    """Takes note of a pool whose memory a CPU gives only as it is used."""
    if runner.platform == "cpu":
        _pools.add(runner)


def promised_bytes() -> int:
    """Bytes that the pools of this process's models may take yet, or have taken already."""
    return sum(pool.config.num_pages * pool.config.cache.page_bytes for pool in list(_pools))


def leaving_room(config: EngineConfig, others: Sequence[EngineConfig]) -> EngineConfig:
    """Returns a configuration whose pool leaves room for other models that are loaded later.

    It keeps the bytes of their weights free as they are stored, and takes of the rest a part like
    theirs. What the configuration itself says of either counts instead.
    """
    if not others or config.reserve_memory or config.kv_cache_share < 1:
        return config
    reserve = sum(_stored_bytes(other) for other in others)
    return replace(config, reserve_memory=reserve, kv_cache_share=1 / (1 + len(others)))


def _stored_bytes(config: EngineConfig) -> int:
    """Bytes of a checkpoint's weights; 0 where there is none, which its own loading will say."""
    try:
        path = resolve_model(config.model, config.revision)
    except CheckpointError as error:
        logger.warning("no memory is kept for a model: %s", error)
        return 0
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def make_cache_spec(
    config: EngineConfig, model: DecoderConfig, platform: str, num_devices: int
) -> CacheSpec:
    """Returns how a model's keys and values are held.

    Raises:
      ConfigError: the platform has no such cache.
      ValueError: the devices do not divide the query heads.
    """
    return CacheSpec(
        platform=platform,
        dtype=_kv_dtype(config, platform),
        num_layers=model.num_layers,
        num_kv_heads=num_cache_kv_heads(model, num_devices),
        head_dim=model.head_dim,
        page_size=config.page_size or default_page_size(platform),
        num_shards=num_devices,
    )


def _kv_dtype(config: EngineConfig, platform: str) -> np.dtype:
    """How keys and values are held: bfloat16, but for `exact` and CPUs that compute in float32.

    Where a CPU rounds what it multiplies to bfloat16 anyway, rounding the cache as well costs
    0.00002 nats per token (SmolLM2 Q4_1 and gemma-3-270m Q4_K_M), and halves what attention reads.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        rounds = cpu.multiplies_bfloat16() if config.dtype == "auto" else config.dtype != "float32"
        is_exact = config.exact or (platform == "cpu" and not rounds)
        name = "float32" if is_exact else "bfloat16"
    if platform == "tpu" and name == "float16":
        raise ConfigError(
            "kv_cache_dtype float16: a TPU has none; choose bfloat16, float32 or int8"
        )
    return paged_attention.kv_dtype(platform, jax.numpy.dtype(name))


def token_budget(config: EngineConfig, platform: str) -> int:
    """Returns the most tokens of one step.

    On CPU a step of 256 tokens is bound by arithmetic: 512 gain 1 % and hold 20 MB more, 64 lose
    20 % of prefill and hold 25 MB less.
    """
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    if platform != "cpu":
        return max(4096, 2 * config.max_num_seqs)
    return max(256, 2 * config.max_num_seqs)


def decode_steps(config: EngineConfig, platform: str, weight_bytes: int) -> tuple[int, int]:
    """Returns the most decode steps of one dispatch, and up to how many rows it may have several.

    On a CPU the host's own work stands still while all cores compute: four steps at once are 12 to
    25 % faster than one for SmolLM2-135M. A client gets their tokens together, so only as many as
    take about 20 ms, which is how long it takes to read BULK_BYTES; more rows take longer.
    """
    most, rows = config.decode_steps, config.max_num_seqs
    if config.deterministic:
        most = 1
    if most is None:
        most, rows = 1, CPU_BULK_ROWS
        if platform == "cpu":
            most = max(1, min(MAX_BULK_STEPS, BULK_BYTES // max(weight_bytes, 1)))
    return min(most, max(1, config.max_decode_steps_before_prefill)), rows


def pool_pages(
    config: EngineConfig, platform: str, page_bytes: int, page_size: int, budget: int, limit: int
) -> int:
    """Returns the pages of the pool, page 0 included: as configured, else what a budget holds.

    Never more than all sequences can use. On a CPU, where the budget is a modest default, a context
    that was asked for gets one sequence at least: the memory plan has found room for it.

    Args:
      page_bytes, page_size: of the cache.
      budget: bytes, where the configuration names neither pages nor bytes.
      limit: tokens of the longest sequence.
    """
    if config.num_pages is not None:
        return config.num_pages + 1
    held = (config.kv_cache_memory or budget) // page_bytes
    is_free = config.kv_cache_memory is None and platform == "cpu"
    if is_free and config.max_model_len is not None:
        held = max(held, -(-limit // page_size))
    return 1 + min(held, -(-config.max_num_seqs * limit // page_size))


def with_pool(
    config: EngineConfig, runner: RunnerConfig, model: CausalLM, watch: CompileWatch
) -> RunnerConfig:
    """Decides the number of pages, and shortens the context if the pool cannot hold it.

    Raises:
      ConfigError: the pool cannot hold one sequence of the context that was asked for.
    """
    cache = runner.cache
    is_given = config.num_pages is not None or config.kv_cache_memory is not None
    budget = 0 if is_given else _free_bytes(config, runner, model, watch)
    num_pages = pool_pages(
        config, cache.platform, cache.page_bytes, cache.page_size, budget, runner.max_model_len
    )
    tokens = (num_pages - 1) * cache.page_size
    if tokens >= runner.max_model_len:
        return replace(runner, num_pages=num_pages)
    if config.max_model_len is not None or tokens < 2 * cache.page_size:
        raise pool_too_small(runner.max_model_len, tokens, cache.page_bytes * (num_pages - 1))
    logger.warning(
        "max_model_len lowered from %d to %d, what the KV pool holds", runner.max_model_len, tokens
    )
    return replace(runner, num_pages=num_pages, max_model_len=tokens)


def pool_too_small(max_model_len: int, tokens: int, num_bytes: int) -> ConfigError:
    """Returns the refusal of a pool that does not hold one sequence."""
    return ConfigError(
        f"max_model_len is {max_model_len} tokens, but the KV pool holds {tokens} "
        f"({num_bytes / 1e6:.0f} MB); lower max_model_len or raise kv_cache_memory"
    )


def _free_bytes(
    config: EngineConfig, runner: RunnerConfig, model: CausalLM, watch: CompileWatch
) -> int:
    """Bytes for the KV cache: on accelerators what weights and temporaries leave."""
    if runner.cache.platform == "cpu":
        taken = promised_bytes() + bytes_to_load(model) + config.reserve_memory
        return cpu_pool_bytes(int(max(0, available_memory() - taken) * config.kv_cache_share))
    device = model.context.mesh.devices.flat[0]
    stats: Mapping[str, int] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not tell its memory; give kv_cache_memory or num_pages")
    num_devices = model.context.tensor_parallel
    taken = temporary_bytes(runner, model, watch) + config.reserve_memory // num_devices
    part = usable_part(config.gpu_memory_utilization, device.platform)
    left = bytes_left(stats, part, taken, config.kv_cache_share)
    return left * num_devices


def usable_part(utilization: float, platform: str) -> float:
    """Returns the part of what a device calls its limit that may be used.

    On a GPU that limit is itself a part of the memory: what XLA takes at once, of which a tenth is
    left free, as blocks of many sizes do not fill it.

    Args:
      utilization: part of all memory that may be used.
      platform: of the device.
    """
    if platform != "gpu":
        return utilization
    taken = float(os.environ.get(XLA_FRACTION, _XLA_DEFAULT))
    return min(utilization / taken, max(0.9, utilization))


def bytes_left(stats: Mapping[str, int], utilization: float, taken: int, share: float = 1.0) -> int:
    """Bytes of one device's memory that a pool may take, given what the device tells.

    Args:
      stats: of the device.
      utilization: part of its limit that may be used.
      taken: bytes for others.
      share: part of what is left for the pool.
    """
    usable = int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - taken
    return max(0, int(usable * share) // GRAIN * GRAIN)


def temporary_bytes(runner: RunnerConfig, model: CausalLM, watch: CompileWatch) -> int:
    """Bytes a device needs beside weights and pool: the temporaries of the widest program.

    They do not depend on the pool, so a small one does for asking the compiler.
    """
    small = replace(runner, num_pages=runner.pages_per_row + 1)
    probe = ModelRunner(model, small, model.config.vocab_size, watch)
    probe.ladders = Ladders(decode=(), tokens=probe.ladders.tokens[-1:])
    probe.compile()
    return max(probe.memory_analysis().values(), default=0)
