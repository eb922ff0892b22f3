"""From a configuration to a running engine: every None decided, the model loaded, all compiled."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jaxinfer import cpu
from jaxinfer.checkpoint import Checkpoint, open_checkpoint, resolve_model
from jaxinfer.compilation_cache import set_compilation_cache
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.models import load_model_module
from jaxinfer.nn.config import DecoderConfig, KVGroup
from jaxinfer.nn.context import ModelContext
from jaxinfer.nn.decoder import CausalLM
from jaxinfer.pool_size import with_pool
from jaxinfer.quantization import SCHEMES, QuantScheme
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.kv_cache import CacheSpec, default_page_size
from jaxinfer.runner.loader import check_tensors, load_weights, make_abstract_model
from jaxinfer.runner.model_runner import ModelRunner, RunnerConfig
from jaxinfer.scheduler.page_tables import GroupSpec, PageTables
from jaxinfer.scheduler.scheduler import Scheduler, SchedulerLimits
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from kernels import paged_attention, quantized_matmul
from kernels.quantized_matmul import QTensor

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
    """

    engine: Engine
    model_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    default_params: dict[str, Any]
    device_kind: str


def load_engine(config: EngineConfig, progress: bool = True) -> LoadedEngine:
    """Loads the model, sizes its KV pool, compiles every program and runs each once.

    Raises:
      ValueError: the checkpoint cannot be used (CheckpointError, WeightError, TokenizerError) or
        the configuration does not fit it (ConfigError).
    """
    began = time.monotonic()
    cpu.set_num_threads(config.num_threads)
    path = resolve_model(config.model, config.revision)
    checkpoint = open_checkpoint(path)
    if config.model_type not in (None, checkpoint.model_type):
        raise ConfigError(
            f"model_type is {config.model_type!r}, but {path.name} is {checkpoint.model_type!r}"
        )
    source = config.tokenizer_path
    tokenizer = load_tokenizer(checkpoint.tokenizer_source if source is None else Path(source))
    chat_template = ChatTemplate.from_tokenizer(tokenizer, config.chat_template)
    if chat_template.unavailable is not None:
        logger.warning("chats will be refused: %s", chat_template.unavailable)
    set_compilation_cache(config.compilation_cache_dir)
    model, groups = load_model(config, checkpoint, progress)
    engine = assemble_engine(
        # To the engine all that came since its last step waits, also what will run in the next.
        replace(config, max_queued_requests=config.max_queued_requests + config.max_num_seqs),
        model,
        groups,
        tokenizer,
        _eos_token_ids(checkpoint, tokenizer),
        progress,
    )
    logger.info("ready after %.1f s", time.monotonic() - began)
    return LoadedEngine(
        engine=engine,
        model_name=_model_name(config.model, path),
        tokenizer=tokenizer,
        chat_template=chat_template,
        default_params={
            name: value
            for name, value in checkpoint.generation_config.items()
            if name in _DEFAULT_SAMPLING and value is not None
        },
        device_kind=model.context.mesh.devices.flat[0].device_kind,
    )


def assemble_engine(
    config: EngineConfig,
    model: CausalLM,
    groups: tuple[KVGroup, ...],
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    progress: bool = False,
) -> Engine:
    """Sizes the pool for a filled model, compiles every program, and runs each once.

    Raises:
      ConfigError: the configuration does not fit the model or the memory.
    """
    watch = CompileWatch()
    # Models pad their embeddings: ids without a token are never sampled.
    vocab_size = min(model.config.vocab_size, tokenizer.vocab_size)
    runner = _make_runner(config, model, len(groups), vocab_size, watch)
    limits = _limits(config, runner)
    runner.reset_device()
    bar = partial(tqdm, desc="Compiling", unit="program", disable=not progress)
    runner.compile(bar, run=True)
    tables = PageTables(
        [GroupSpec(runner.config.num_pages, group.window) for group in groups],
        runner.config.cache.page_size,
    )
    _log_setup(runner, limits, model, watch)
    return Engine(
        runner, Scheduler(limits, tables), tokenizer, eos_token_ids, config.max_queued_requests
    )


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
    scheme = _quant_scheme(config.quant, platform)
    _max_model_len(config, model_config)
    dtype, weight_dtype = _dtypes(config, platform)
    context = ModelContext(
        mesh=mesh,
        platform=platform,
        dtype=dtype,
        weight_dtype=weight_dtype,
        precision="highest" if config.exact else None,
        attention=config.attention,
        matmul=config.matmul,
        quant=scheme,
    )
    model = make_abstract_model(module, model_config, context)
    shapes = {name: info.shape for name, info in checkpoint.tensor_infos.items()}
    try:
        check_tensors(model, module, shapes)
        load_weights(model, module, checkpoint.tensors(progress))
    except ValueError as error:
        error.add_note(f"checkpoint: {checkpoint.path}")
        raise
    return model, module.kv_groups(model_config)


def _dtypes(config: EngineConfig, platform: str) -> tuple[np.dtype, np.dtype]:
    """Dtypes of activations and of weights; they differ only where "auto" chooses on a CPU.

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
    has_products = {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu.features().split())
    return float32, bfloat16 if has_products else float32


def _kv_dtype(config: EngineConfig, platform: str) -> np.dtype:
    """How keys and values are held: float32 on CPU and for `exact`, else bfloat16."""
    name = config.kv_cache_dtype
    if name == "auto":
        name = "float32" if config.exact or platform == "cpu" else "bfloat16"
    if platform == "tpu" and name == "float16":
        raise ConfigError("kv_cache_dtype float16: a TPU has none; choose bfloat16 or float32")
    return paged_attention.kv_dtype(platform, jax.numpy.dtype(name))


def _max_model_len(config: EngineConfig, model_config: DecoderConfig) -> int:
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


def _quant_scheme(name: str | None, platform: str) -> QuantScheme | None:
    if name is None:
        return None
    if name not in SCHEMES:
        raise ConfigError(f"quant {name!r} is unknown; choose one of {', '.join(SCHEMES)}")
    if platform == "cpu":
        logger.warning(
            "quant %s: XLA:CPU dequantizes each matrix at every step, which is slower than "
            "without --quant",
            name,
        )
    return SCHEMES[name]


def _make_runner(
    config: EngineConfig, model: CausalLM, num_groups: int, vocab_size: int, watch: CompileWatch
) -> ModelRunner:
    context, model_config = model.context, model.config
    max_model_len = _max_model_len(config, model_config)
    cache = CacheSpec(
        platform=context.platform,
        dtype=_kv_dtype(config, context.platform),
        num_layers=model_config.num_layers,
        num_kv_heads=model.num_cache_kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size or default_page_size(context.platform),
        num_shards=context.tensor_parallel,
    )
    budget = config.max_num_batched_tokens
    if budget is None:
        # On CPU a step of 256 tokens is bound by arithmetic: 512 gain 5 % of prefill, and cost a
        # program more to compile, to load at each start (1 s) and to hold (50 MB).
        budget = max(256 if context.platform == "cpu" else 4096, 2 * config.max_num_seqs)
    runner_config = RunnerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        decode_steps=min(config.decode_steps, config.max_decode_steps_before_prefill),
        cache=cache,
        num_pages=0,
        num_groups=num_groups,
    )
    return ModelRunner(model, with_pool(config, runner_config, model, watch), vocab_size, watch)


def _limits(config: EngineConfig, runner: ModelRunner) -> SchedulerLimits:
    budget = runner.config.max_num_batched_tokens
    chunk = config.max_prefill_chunk_tokens
    if chunk is None:
        # Beside a full batch of decodes it must still fit the budget.
        chunk = min(512, max(budget - config.max_num_seqs, 1))
    depth = config.pipeline_depth
    if depth is None:
        depth = 1
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk_tokens=min(chunk, budget),
        max_decode_steps_before_prefill=config.max_decode_steps_before_prefill,
        decode_steps=config.decode_steps,
        pipeline_depth=depth,
    )


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


def _log_setup(
    runner: ModelRunner, limits: SchedulerLimits, model: CausalLM, watch: CompileWatch
) -> None:
    """Says what was decided: device, implementations, ladders, pool."""
    config, cache, context = runner.config, runner.config.cache, model.context
    devices = context.mesh.devices.flat
    logger.info(
        "device: %d × %s (%s), activations %s, KV cache %s",
        context.mesh.devices.size,
        devices[0].device_kind,
        context.platform,
        context.dtype.name,
        np.dtype(cache.dtype).name,
    )
    attention = paged_attention.choose(
        jax.ShapeDtypeStruct(
            (limits.max_num_seqs, model.config.num_heads, cache.head_dim), context.dtype
        ),
        cache.layer(config.num_pages),
        platform=context.platform,
        implementation=context.attention,
    )
    logger.info("paged_attention: %s", attention)
    weight = model.layers[0].mlp.down.weight.get_value()
    if isinstance(weight, QTensor):
        rows = jax.ShapeDtypeStruct((limits.max_num_seqs, weight.shape[1]), context.dtype)
        matmul = quantized_matmul.choose(
            rows, weight, platform=context.platform, implementation=context.matmul
        )
        logger.info("quantized_matmul (%s): %s", weight.code, matmul)
    else:
        logger.info("matmul: xla (%s weights)", context.weight_dtype.name)
    logger.info(
        "ladder: decode %s, tokens %s; %d programs, %d executables in %.1f s",
        runner.ladders.decode,
        runner.ladders.tokens,
        runner.num_programs,
        watch.num_compiles,
        watch.seconds,
    )
    pages = config.num_pages - 1
    logger.info(
        "KV pool: %d tokens in %d pages of %d (%.0f MB); context %d tokens",
        pages * cache.page_size,
        pages,
        cache.page_size,
        math.prod((pages, cache.page_bytes)) / 1e6,
        config.max_model_len,
    )
    logger.info(
        "steps: %d sequences, %d tokens, %d prompt tokens beside decodes, %d decode steps at once, "
        "pipeline depth %d",
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_prefill_chunk_tokens,
        limits.bulk_steps,
        limits.pipeline_depth,
    )
