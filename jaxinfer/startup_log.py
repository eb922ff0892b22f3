"""What the start-up log says was decided: device, implementations, weights, ladders, pool."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from jaxinfer.nn.decoder import CausalLM
from jaxinfer.runner.compile_watch import CompileWatch
from jaxinfer.runner.loader import parameters
from jaxinfer.runner.model_runner import ModelRunner
from jaxinfer.scheduler.limits import SchedulerLimits
from kernels import paged_attention, quantized_matmul
from kernels.dispatch import Choice
from kernels.quantized_matmul import QTensor

logger = logging.getLogger(__name__)


def log_setup(
    runner: ModelRunner,
    limits: SchedulerLimits,
    model: CausalLM,
    watch: CompileWatch,
    has_prefix_cache: bool,
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
        cache.dtype_name,
    )
    logger.info("paged_attention: %s", _attention_choice(runner, model))
    logger.info("decoder_layers: %s", _layers_choice(runner, model, limits.max_num_seqs))
    _log_weights(model, limits.max_num_seqs)
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
        "KV pool: %d tokens of %d bytes in %d pages of %d (%.0f MB); prefix cache %s; "
        "context %d tokens",
        pages * cache.page_size,
        cache.token_bytes,
        pages,
        cache.page_size,
        math.prod((pages, cache.page_bytes)) / 1e6,
        "on" if has_prefix_cache else "off",
        config.max_model_len,
    )
    logger.info(
        "steps: %d sequences, %d tokens, %s, %d decode steps at once, pipeline depth %d, "
        "speculation %s",
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        _prompts(limits),
        limits.bulk_steps(1),
        limits.pipeline_depth,
        _speculation(limits),
    )


def _attention_choice(runner: ModelRunner, model: CausalLM) -> Choice:
    config, context = runner.config, model.context
    queries = (config.max_num_seqs, model.config.num_heads, config.cache.head_dim)
    return paged_attention.choose(
        jax.ShapeDtypeStruct(queries, context.dtype),
        config.cache.layer(config.num_pages),
        platform=context.platform,
        implementation=context.attention,
    )


def implementations(runner: ModelRunner, model: CausalLM) -> dict[str, object]:
    """What computes attention and multiplies quantized weights, as values of the settings."""
    choices = _matmul_choices(model, runner.config.max_num_seqs).values()
    return {
        "attention": _attention_choice(runner, model).name,
        "matmul": tuple(sorted({choice.name for choice in choices})),
    }


def _prompts(limits: SchedulerLimits) -> str:
    if limits.chunk_tokens is None:
        most = limits.max_prefill_chunk_tokens
        if limits.prefill_pace is None:
            return f"{most} prompt tokens beside decodes"
        beside_one = min(most, round(limits.prefill_pace.of_step(1)))
        return f"{beside_one} to {most} prompt tokens beside decodes, the fewer the longer it is"
    size = limits.chunk_tokens
    return f"deterministic: prompts cut at multiples of {size}, no decodes beside them"


def _speculation(limits: SchedulerLimits) -> str:
    if not limits.num_draft_tokens:
        return "off"
    most = limits.max_tokens_with_drafts
    return f"of {limits.num_draft_tokens} tokens a sequence in steps of at most {most}"


def _layers_choice(runner: ModelRunner, model: CausalLM, num_rows: int) -> str:
    """Returns what runs all layers of a step in one call, or why each is run by itself."""
    x = jax.ShapeDtypeStruct((num_rows, model.config.hidden_size), model.context.dtype)
    cache = runner.config.cache.layer(runner.config.num_pages)
    try:
        return str(model.choose_fused(x, (cache,) * model.config.num_layers)[0])
    except NotImplementedError as refusal:
        return f"one by one ({refusal})"


def _log_weights(model: CausalLM, num_rows: int) -> None:
    """Says what the weights are kept as, and what multiplies each kind."""
    sizes: Counter[str] = Counter()
    for leaf in _weights(model):
        if isinstance(leaf, QTensor):
            sizes[f"{leaf.code} in groups of {leaf.group_size}"] += leaf.num_bytes
        else:
            sizes[leaf.dtype.name] += leaf.nbytes
    kinds = ", ".join(f"{size / 1e6:.1f} MB of {kind}" for kind, size in sizes.most_common())
    logger.info("weights: %s", kinds)
    for code, choice in _matmul_choices(model, num_rows).items():
        logger.info("quantized_matmul (%s): %s", code, choice)


def _matmul_choices(model: CausalLM, num_rows: int) -> dict[str, Choice]:
    """Returns what multiplies the quantized weights, by their code."""
    context = model.context
    # One of each will do: the last.
    quantized = {leaf.code: leaf for leaf in _weights(model) if isinstance(leaf, QTensor)}
    return {
        code: quantized_matmul.choose(
            jax.ShapeDtypeStruct((num_rows, leaf.shape[1]), context.dtype),
            leaf,
            platform=context.platform,
            implementation=context.matmul,
        )
        for code, leaf in quantized.items()
    }


def _weights(model: CausalLM) -> Iterator[Any]:
    for _, param in parameters(model):
        yield from jax.tree.leaves(
            param.get_value(), is_leaf=lambda leaf: isinstance(leaf, QTensor)
        )
