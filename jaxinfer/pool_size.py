"""How many pages the KV pool gets: what is asked for, or what memory is left."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.buckets import Ladders
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import cpu_pool_bytes
from jaxinfer.runner.model_runner import ModelRunner, RunnerConfig

logger = logging.getLogger(__name__)

GRAIN = 256 * 2**20
"""Pools sized from free memory are multiples of this: a few bytes of difference between two runs
must not change the programs' shapes, or the compilation cache would miss."""


def with_pool(
    config: EngineConfig, runner: RunnerConfig, model: CausalLM, watch: CompileWatch
) -> RunnerConfig:
    """Decides the number of pages, and shortens the context if the pool cannot hold it.

    Raises:
      ConfigError: the pool cannot hold one sequence of the context that was asked for.
    """
    cache = runner.cache
    if config.num_pages is not None:
        num_pages = config.num_pages + 1
    else:
        budget = config.kv_cache_memory or _free_bytes(config, runner, model, watch)
        num_pages = cache.num_pages(budget, runner.max_num_seqs * runner.max_model_len)
    tokens = (num_pages - 1) * cache.page_size
    if tokens >= runner.max_model_len:
        return replace(runner, num_pages=num_pages)
    if config.max_model_len is not None or tokens < 2 * cache.page_size:
        raise ConfigError(
            f"max_model_len is {runner.max_model_len} tokens, but the KV pool holds {tokens} "
            f"({cache.page_bytes * (num_pages - 1) / 1e6:.0f} MB); lower max_model_len or raise "
            "kv_cache_memory"
        )
    logger.warning(
        "max_model_len lowered from %d to %d, what the KV pool holds", runner.max_model_len, tokens
    )
    return replace(runner, num_pages=num_pages, max_model_len=tokens)


def _free_bytes(
    config: EngineConfig, runner: RunnerConfig, model: CausalLM, watch: CompileWatch
) -> int:
    """Bytes for the KV cache: on accelerators what weights and temporaries leave."""
    if runner.cache.platform == "cpu":
        return cpu_pool_bytes()
    device = model.context.mesh.devices.flat[0]
    stats: Mapping[str, int] | None = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"{device} does not tell its memory; give kv_cache_memory or num_pages")
    temporaries = temporary_bytes(runner, model, watch)
    left = bytes_left(stats, config.gpu_memory_utilization, temporaries)
    return left * model.context.tensor_parallel


def bytes_left(stats: Mapping[str, int], utilization: float, temporaries: int) -> int:
    """Bytes of one device's memory that a pool may take, given what the device tells."""
    usable = int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - temporaries
    return max(0, usable // GRAIN * GRAIN)


def temporary_bytes(runner: RunnerConfig, model: CausalLM, watch: CompileWatch) -> int:
    """Bytes a device needs beside weights and pool: the temporaries of the widest program.

    They do not depend on the pool, so a small one does for asking the compiler.
    """
    small = replace(runner, num_pages=runner.pages_per_row + 1)
    probe = ModelRunner(model, small, model.config.vocab_size, watch)
    probe.ladders = Ladders(decode=(), tokens=probe.ladders.tokens[-1:])
    probe.compile()
    return max(probe.memory_analysis().values(), default=0)
