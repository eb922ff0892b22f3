"""From a configuration to a running engine: every None decided, all compiled, the model loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxinfer import cpu
from jaxinfer.checkpoint import Checkpoint, open_checkpoint, resolve_model
from jaxinfer.checkpoint.default_model import FILE_NAME as DEFAULT_FILE
from jaxinfer.chunk_sizes import chunk_tokens, prefill_chunk, prefill_pace
from jaxinfer.collection import paused_collection
from jaxinfer.compilation_cache import program_store, set_compilation_cache
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.effective_settings import engine_settings, one_line
from jaxinfer.engine import Engine
from jaxinfer.model_loading import context_length, prepare_model
from jaxinfer.nn.config import KVGroup
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.pool_size import (
    decode_steps,
    make_cache_spec,
    promise_pool,
    token_budget,
    with_pool,
)
from jaxinfer.runner import host_memory
from jaxinfer.runner.buckets import VERIFY_TOKENS
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import CacheSpec
from jaxinfer.runner.loader import parameter_bytes
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.runner.runner_config import RunnerConfig
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.prefix_cache import PrefixCache
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.startup_log import implementations, log_setup
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_DEFAULT_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to step, and what its clients need to know of the model.

    Attributes:
      engine: compiled and warm.
      model_name: how it is called when no other name is given.
      tokenizer: of the model.
      chat_template: one that is missing or broken says so when it renders.
      default_params: sampling settings the checkpoint recommends.
      device_kind: what the model runs on.
      settings: all settings by name, as text: the values in effect.
    """

    engine: Engine
    model_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    default_params: dict[str, Any]
    device_kind: str
    settings: Mapping[str, str] = field(default_factory=dict)


@paused_collection()
def load_engine(config: EngineConfig, progress: bool = True) -> LoadedEngine:
    """Loads the model, sizes its KV pool, compiles every program and runs each once.

    Raises:
      ValueError: the checkpoint cannot be used (CheckpointError, WeightError, TokenizerError) or
        the configuration does not fit it (ConfigError).
    """
    began = time.monotonic()
    cpu.set_num_threads(config.num_threads)
    host_memory.limit_arenas()
    path, checkpoint, tokenizer = open_model(config)
    chat_template = ChatTemplate.from_tokenizer(tokenizer, config.chat_template)
    if chat_template.unavailable is not None:
        logger.warning("chats will be refused: %s", chat_template.unavailable)
    if config.gpu_layers is not None:
        logger.warning(
            "gpu_layers %d has no effect: all layers run on one platform; --quant, "
            "--kv-cache-dtype int8 and --max-model-len take less of its memory",
            config.gpu_layers,
        )
    set_compilation_cache(config.compilation_cache_dir)
    prepared = prepare_model(config, checkpoint, progress)
    engine = assemble_engine(
        # To the engine all that came since its last step waits, also what will run in the next.
        replace(config, max_queued_requests=config.max_queued_requests + config.max_num_seqs),
        prepared.model,
        prepared.groups,
        tokenizer,
        _eos_token_ids(checkpoint, tokenizer),
        progress,
        prepared.fill,
    )
    if config.prepare_grammars:
        engine.prepare_grammars()
    model_name = _model_name(config.model, path)
    settings = engine_settings(
        config,
        engine.runner,
        engine.scheduler.limits,
        prepared.model,
        {
            "model": model_name,
            "model_type": checkpoint.model_type,
            "quant": prepared.quant,
            **implementations(engine.runner, prepared.model),
        },
    )
    logger.info("settings: %s", one_line(settings))
    logger.info("ready after %.1f s", time.monotonic() - began)
    return LoadedEngine(
        engine=engine,
        model_name=model_name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        default_params={
            name: value
            for name, value in checkpoint.generation_config.items()
            if name in _DEFAULT_SAMPLING and value is not None
        },
        device_kind=prepared.model.context.mesh.devices.flat[0].device_kind,
        settings=settings,
    )


def open_model(config: EngineConfig) -> tuple[Path, Checkpoint, Tokenizer]:
    """Returns where the model is, its checkpoint, no weight of it read yet, and its tokenizer.

    Raises:
      ValueError: the checkpoint cannot be used (CheckpointError, TokenizerError), or is not of the
        `model_type` that was asked for (ConfigError).
    """
    path = resolve_model(config.model, config.revision)
    checkpoint = open_checkpoint(path)
    if config.model_type not in (None, checkpoint.model_type):
        raise ConfigError(
            f"model_type is {config.model_type!r}, but {path.name} is {checkpoint.model_type!r}"
        )
    source = config.tokenizer_path
    tokenizer = load_tokenizer(checkpoint.tokenizer_source if source is None else Path(source))
    return path, checkpoint, tokenizer


def assemble_engine(
    config: EngineConfig,
    model: CausalLM,
    groups: tuple[KVGroup, ...],
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    progress: bool = False,
    fill: Callable[[], None] | None = None,
) -> Engine:
    """Sizes the pool for a model and compiles every program; accelerators also run each once.

    On a CPU that would take longer than what the first requests save by it: 0.7 s against 0.04 s
    for each program of SmolLM2-135M.

    Args:
      fill: loads the weights of an abstract model; called when all is compiled and compilers have
        given their memory back. None for a model that is filled.

    Raises:
      ConfigError: the configuration does not fit the model or the memory.
    """
    watch = CompileWatch()
    # Models pad their embeddings: ids without a token are never sampled.
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    runner = _make_runner(config, model, len(groups), vocab_size, watch)
    promise_pool(runner)
    limits = _limits(config, runner, model)
    bar = partial(tqdm, desc="Compiling", unit="program", disable=not progress)
    if fill is None:
        runner.reset_device()
        runner.compile(bar, run=model.context.platform != "cpu", store=program_store(runner))
    else:
        runner.compile(bar, store=program_store(runner))
        # Making the pool is one core's work and needs no interpreter: 0.4 s for 1 GiB.
        with ThreadPoolExecutor(1) as other:
            pool = other.submit(runner.reset_device)
            fill()
            pool.result()
        runner.take_weights(model)
    runner.use_huge_pages()
    tables = PageTables(
        [GroupSpec(runner.config.num_pages, group.window) for group in groups],
        runner.config.cache.page_size,
    )
    salt = _cache_salt(config, model, runner.config.cache)
    cache = PrefixCache(tables, salt, limits.chunk_tokens) if config.prefix_cache else None
    log_setup(runner, limits, model, watch, cache is not None)
    return Engine(
        runner,
        Scheduler(limits, tables, cache),
        tokenizer,
        eos_token_ids,
        config.max_queued_requests,
    )


def cache_spec(config: EngineConfig, model: CausalLM) -> CacheSpec:
    """Returns how the model's keys and values are held."""
    context = model.context
    return make_cache_spec(config, model.config, context.platform, context.tensor_parallel)


def _cache_salt(config: EngineConfig, model: CausalLM, cache: CacheSpec) -> bytes:
    """Stands for all that changes what is in a page of given tokens."""
    parts = (
        *(config.model, config.revision, config.quant, config.quant_group_size),
        *(model.config, model.context.dtype.name, model.context.precision),
        *(cache.dtype_name, cache.page_size),
    )
    return repr(parts).encode()


def _make_runner(
    config: EngineConfig, model: CausalLM, num_groups: int, vocab_size: int, watch: CompileWatch
) -> ModelRunner:
    context = model.context
    max_model_len = context_length(config, model.config)
    cache = cache_spec(config, model)
    steps, bulk_rows = decode_steps(config, context.platform, parameter_bytes(model))
    runner_config = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=token_budget(config, context.platform),
        max_model_len=max_model_len,
        decode_steps=steps,
        bulk_rows=bulk_rows,
        cache=cache,
        num_pages=0,
        num_groups=num_groups,
        verifies=config.speculation != "off",
        one_rung=config.deterministic,
    )
    return ModelRunner(model, with_pool(config, runner_config, model, watch), vocab_size, watch)


def _limits(config: EngineConfig, runner: ModelRunner, model: CausalLM) -> SchedulerLimits:
    budget = runner.config.max_num_batched_tokens
    depth = config.pipeline_depth
    if depth is None:
        depth = 1
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=prefill_chunk(config, budget),
        prefill_pace=prefill_pace(config, model.config, runner.platform),
        max_decode_steps_before_prefill=config.max_decode_steps_before_prefill,
        decode_steps=runner.config.decode_steps,
        bulk_rows=runner.config.bulk_rows,
        pipeline_depth=depth,
        num_draft_tokens=0 if config.speculation == "off" else config.num_draft_tokens,
        max_tokens_with_drafts=VERIFY_TOKENS[runner.platform],
        chunk_tokens=chunk_tokens(config, budget, runner.config.cache.page_size),
    )


def expected_name(model: str | None) -> str:
    """Returns what a model will be called when no other name is given, without looking at it."""
    return _model_name(model, Path(DEFAULT_FILE if model is None else model).expanduser())


def _model_name(model: str | None, path: Path) -> str:
    """The hub id as given, else the directory's or the GGUF file's own name; never a path."""
    if model is not None and not Path(model).expanduser().exists():
        return model
    return path.resolve().name.removesuffix(".gguf")


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Everything the tokenizer, config.json and generation_config.json call end-of-sequence."""
    ids = set(tokenizer.eos_token_ids)
    for values in (checkpoint.generation_config, checkpoint.hf_config):
        eos = values.get("eos_token_id")
        ids |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
