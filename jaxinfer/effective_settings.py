"""Every setting with the value in effect: what was asked for, or decided where nothing was.

The start-up log and /metrics both show what is made here, so that neither can miss a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import jax

from jaxinfer import cpu
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.scheduler.limits import SchedulerLimits

_FILES = ("chat_template", "compilation_cache_dir", "tokenizer_path")
"""Of these the last name is shown: who may read /metrics need not know where things lie."""


def engine_settings(
    config: EngineConfig,
    runner: ModelRunner,
    limits: SchedulerLimits,
    model: CausalLM,
    decided: Mapping[str, object],
) -> dict[str, str]:
    """Returns an engine's settings by name, as text.

    Args:
      config: what was asked for.
      runner, limits, model: what became of it.
      decided: what cannot be read off those.
    """
    shapes, context = runner.config, model.context
    cache = shapes.cache
    return shown(
        config,
        {
            "dtype": context.dtype.name,
            "quant_group_size": None if context.quant is None else context.quant.linear.group_size,
            "kv_cache_dtype": cache.dtype_name,
            "max_model_len": shapes.max_model_len,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_prefill_chunk_tokens": limits.chunk_tokens or limits.max_prefill_chunk_tokens,
            "decode_steps": limits.bulk_steps(1),
            "page_size": cache.page_size,
            "num_pages": shapes.num_pages - 1,
            "kv_cache_memory": (shapes.num_pages - 1) * cache.page_bytes,
            "num_draft_tokens": limits.num_draft_tokens,
            "tensor_parallel": context.tensor_parallel,
            "num_threads": cpu.num_threads(),
            "pipeline_depth": limits.pipeline_depth,
            "compilation_cache_dir": jax.config.values["jax_compilation_cache_dir"],
            **decided,
        },
    )


def shown(
    config: EngineConfig | ServerConfig, decided: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Returns the settings of a configuration by name, but for secrets, as text.

    Args:
      config: what was asked for.
      decided: values that count instead.

    Raises:
      KeyError: `decided` names no setting of it.
    """
    # Secrets are what `repr` leaves out as well.
    values = {item.name: getattr(config, item.name) for item in fields(config) if item.repr}
    for name, value in (decided or {}).items():
        if name not in values:
            raise KeyError(f"{type(config).__name__} has no setting {name} to show")
        values[name] = value
    return {name: _text(name, value) for name, value in values.items()}


def one_line(settings: Mapping[str, str]) -> str:
    """Returns settings as a line of the start-up log."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _text(name: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value)) or "none"
    return Path(str(value)).name if name in _FILES else str(value)
